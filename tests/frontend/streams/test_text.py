"""The parts of answers, and how many tokens of one are reasoning."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from triptych.text.answer_parser import ReasoningFormat
from triptych_services.frontend.streams.text import ReasoningTokens

THINK = ReasoningFormat("think", "<think>", "</think>")
texts = st.text("<>/think x", max_size=12).filter(lambda text: THINK.closing not in text)


def read(pieces: list[str], *, is_open: bool) -> ReasoningTokens:
    """The tokens are numbers of pieces; they come one by one."""
    tokens = ReasoningTokens(THINK, lambda number: pieces[number].encode(), is_open=is_open)
    for number in range(len(pieces)):
        tokens.add([number])
    return tokens


def count(pieces: list[str], *, is_open: bool) -> int:
    return read(pieces, is_open=is_open).num_tokens


@given(texts, st.text("<>/think x", max_size=8), st.lists(st.integers(1, 30)), st.booleans())
def test_tokens_between_the_marks_count(body: str, rest: str, cuts: list[int], is_open: bool) -> None:
    opening = "" if is_open else THINK.opening
    text = opening + body + THINK.closing + rest
    end = len(opening) + text[len(opening) :].index(THINK.closing)
    places = sorted({0, len(opening), *(cut for cut in cuts if cut < len(text)), len(text)})
    spans = list(itertools.pairwise(places))
    tokens = read([text[start:stop] for start, stop in spans], is_open=is_open)
    assert tokens.num_tokens == sum(len(opening) <= start and stop <= end for start, stop in spans)
    end += len(THINK.closing)
    assert tokens.num_with_marks == sum(start < end and not text[end:stop].strip() for start, stop in spans)


def test_reasoning_that_does_not_end_counts() -> None:
    assert count(["\n", "<th", "ink>", "a", "b"], is_open=False) == 2
    assert count(["a", "b", "</thi"], is_open=True) == 3


def test_tokens_before_the_answer_have_its_marks() -> None:
    assert read(["\n<think>", "a", "</th", "ink>\n", "\n", "b"], is_open=False).num_with_marks == 4
    assert read(["a", "</think>b"], is_open=True).num_with_marks == 1
    assert read(["\n", "<th"], is_open=False).num_with_marks == 0
    assert read(["<b>", "a"], is_open=False).num_with_marks == 0


def test_an_answer_that_mentions_the_mark_has_no_reasoning() -> None:
    assert count(["Write ", "<think>", "a", "</think>"], is_open=False) == 0
    assert count(["<b>", "a"], is_open=False) == 0
