"""Stop strings end an output at the right character and never leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.text.stop import StopChecker, StopMatch

letters = st.text("ab", max_size=4)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def naive(text: str, stop: list[str], include: bool, num_exempt: int = 0) -> tuple[str, StopMatch | None]:
    """Look at every beginning of the text, the shortest first, and at every stop string, the longest first."""
    for end in range(num_exempt + 1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], StopMatch(string, end)
    return text, None


@settings(max_examples=500, deadline=None)
@given(st.text("ab", max_size=40), stops, st.booleans(), st.integers(0, 20))
def test_all_at_once_is_as_the_naive_search_has_it(
    text: str, stop: list[str], include: bool, num_exempt: int
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown, match = checker.push(text, num_exempt=num_exempt)
    if match is None:
        shown += checker.flush()
    assert (shown, match) == naive(text, stop, include, num_exempt)


@settings(max_examples=500, deadline=None)
@given(st.lists(letters, max_size=12), stops, st.booleans(), st.integers(0, 20))
def test_piece_by_piece_shows_the_same_and_takes_nothing_back(
    pieces: list[str], stop: list[str], include: bool, num_exempt: int
) -> None:
    expected, expected_match = naive("".join(pieces), stop, include, num_exempt)
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown, match, num_before = "", None, 0
    for number, piece in enumerate(pieces, start=1):
        new, found = checker.push(piece, num_exempt=max(0, num_exempt - num_before))
        shown += new
        assert expected.startswith(shown)
        if found is not None:
            match = StopMatch(found.stop, num_before + found.end)
            break
        num_before += len(piece)
        # What is held back is exactly what could still become a stop string.
        text = "".join(pieces[:number])
        held = max((n for string in stop for n in range(len(string)) if text.endswith(string[:n])), default=0)
        assert shown == text[: len(text) - held]
    else:
        shown += checker.flush()
    assert (shown, match) == (expected, expected_match)


def test_a_stop_string_that_spans_tokens_never_leaks() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("Fine.\n") == ("Fine.", None)
    assert checker.push("\nUs") == ("", None)
    assert checker.push("er: more") == ("", StopMatch("\n\nUser:", 3))


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    checker = StopChecker(["abc"])
    assert checker.push("ab") == ("", None)
    assert checker.push("d") == ("abd", None)
    assert checker.push("a") == ("", None)
    assert checker.flush() == "a"
    assert checker.flush() == ""


@pytest.mark.parametrize("stop", [["def", "ef", "zz"], ["zz", "ef", "def"]])
def test_the_longest_of_those_completed_together_wins_whatever_their_order(stop: list[str]) -> None:
    assert StopChecker(stop).push("abcdefg") == ("abc", StopMatch("def", 6))


def test_the_one_completed_first_wins_even_where_another_began_before() -> None:
    assert StopChecker(["abcdef", "cd"]).push("abcdef") == ("ab", StopMatch("cd", 4))


def test_the_stop_string_may_be_kept_in_the_output() -> None:
    checker = StopChecker(["ef"], include_stop_str_in_output=True)
    assert checker.push("abcdefg") == ("abcdef", StopMatch("ef", 6))


def test_a_stop_string_begun_in_exempt_text_counts() -> None:
    checker = StopChecker(["bc"])
    assert checker.push("a", num_exempt=2) == ("a", None)
    assert checker.push("b", num_exempt=1) == ("", None)
    assert checker.push("c") == ("", StopMatch("bc", 1))


def test_an_ignored_stop_string_may_overlap_the_one_that_counts() -> None:
    assert StopChecker(["aa"]).push("aaa", num_exempt=2) == ("a", StopMatch("aa", 3))


def test_an_ignored_stop_string_within_what_is_held_back_stays_ignored() -> None:
    checker = StopChecker(["abc", "b"])
    assert checker.push("ab", num_exempt=2) == ("", None)
    assert checker.push("d") == ("abd", None)


def test_without_stop_strings_everything_passes_at_once() -> None:
    checker = StopChecker([])
    assert checker.push("ab") == ("ab", None)
    assert checker.flush() == ""
