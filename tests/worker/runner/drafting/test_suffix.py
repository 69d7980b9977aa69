"""Guesses from outputs of the same scope."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tests.worker.tiny import new_row
from triptych.types.step import NewRow, RowContent
from triptych_services.worker.runner.drafting.suffix import SuffixProposer
from triptych_services.worker.sampling.params import TokenHistory

NUM_SLOTS, LENGTH = 3, 6000
MIB = 1 << 20


class Rows:
    """A history, and a proposer that reads it."""

    def __init__(self, max_bytes: int = MIB) -> None:
        counts = np.zeros((2, NUM_SLOTS), np.int64)
        self.history = TokenHistory(np.zeros((NUM_SLOTS, LENGTH), np.int32), *counts)
        self.proposer = SuffixProposer(NUM_SLOTS, max_bytes, history=self.history)

    def enter(self, slot: int, tokens: Sequence[int], scope: str, *, num_prompt: int = 1) -> None:
        self.history.token_ids[slot, : len(tokens)] = tokens
        self.history.num_prompt[slot], self.history.num_known[slot] = num_prompt, len(tokens)
        self.proposer.enter(row_of(slot, scope))

    def say(self, output: Sequence[int], scope: str) -> None:
        """Let a row of another slot say this after a prompt of one token."""
        self.enter(2, [0, *output], scope)
        self.proposer.leave(2)

    def guess(self, tokens: Sequence[int], scope: str, limit: int = 8) -> list[int]:
        self.enter(0, tokens, scope)
        guesses = self.proposer.propose(np.array([0]), np.array([limit]))
        assert guesses.counts.tolist() == [guesses.token_ids.size]
        self.proposer.enter(row_of(0, ""))
        return guesses.token_ids.tolist()


def row_of(slot: int, scope: str) -> NewRow:
    row = new_row(slot, [1], [1])
    content = RowContent(row.content.prompt_token_ids, row.sampling, draft_scope=scope)
    return NewRow(slot, 0, content, row.emitted_token_ids, 0, 0, row.block_ids, 0)


def test_what_followed_before_is_guessed() -> None:
    rows = Rows()
    rows.say([5, 6, 7, 8, 9, 10, 11], "a")
    assert rows.guess([1, 5, 6, 7], "a") == [8, 9, 10, 11]
    assert rows.guess([1, 5, 6, 7], "a", limit=2) == [8, 9]
    assert rows.guess([6, 7], "a") == [], "too few tokens to agree"
    assert rows.guess([1, 6, 5, 7], "a") == []


def test_no_scope_sees_another() -> None:
    rows = Rows()
    rows.say([5, 6, 7, 8, 9], "a")
    rows.say([5, 6, 7, 1, 2], "b")
    rows.say([5, 6, 7, 3, 4], "")
    assert rows.guess([5, 6, 7], "a") == [8, 9]
    assert rows.guess([5, 6, 7], "b") == [1, 2]
    assert rows.guess([5, 6, 7], "c") == []
    assert rows.guess([5, 6, 7], "") == []


def test_prompts_are_not_remembered() -> None:
    rows = Rows()
    rows.enter(2, [5, 6, 7, 8, 9, 1, 2, 3, 4], "a", num_prompt=5)
    rows.proposer.leave(2)
    assert rows.guess([5, 6, 7], "a") == []
    assert rows.guess([1, 2, 3], "a") == [4]


def test_the_longest_common_end_decides_and_then_the_latest() -> None:
    rows = Rows()
    rows.say([20, 5, 6, 7, 1], "a")
    rows.say([21, 5, 6, 7, 2], "a")
    assert rows.guess([9, 20, 5, 6, 7], "a") == [1]
    assert rows.guess([9, 21, 5, 6, 7], "a") == [2]
    assert rows.guess([9, 9, 5, 6, 7], "a") == [2]


def test_guesses_end_with_the_output_that_they_are_from() -> None:
    rows = Rows()
    rows.say([5, 6, 7, 8], "a")
    rows.say([30, 31, 32, 33], "a")
    assert rows.guess([5, 6, 7], "a") == [8]
    assert rows.guess([6, 7, 8], "a") == [], "nothing followed"


def test_bytes_are_bounded_and_the_oldest_makes_room() -> None:
    rows = Rows(max_bytes=200 * 100)  # a hundred tokens
    rows.say(range(1000, 1040), "a")
    rows.say(range(2000, 2040), "b")
    rows.say(range(3000, 3040), "b")
    assert rows.guess([1005, 1006, 1007], "a") == [], "the scope that was used least recently"
    assert rows.guess([2005, 2006, 2007], "b", limit=1) == [2008]
    rows.say(range(4000, 4040), "b")
    assert rows.guess([2005, 2006, 2007], "b") == [], "the older half"
    assert rows.guess([4005, 4006, 4007], "b", limit=1) == [4008]
    rows.say(range(5000, 5200), "b")
    assert rows.guess([5005, 5006, 5007], "b") == [], "longer than all that is kept"


@given(
    outputs=st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=30), max_size=5),
    row=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    limit=st.integers(1, 8),
)
def test_a_guess_has_always_followed_the_same_three_tokens(
    outputs: list[list[int]], row: list[int], limit: int
) -> None:
    rows = Rows()
    for output in outputs:
        rows.say(output, "a")
    guess = rows.guess(row, "a", limit)
    texts = [" ".join(map(str, output)) for output in outputs]
    assert len(guess) <= limit
    if guess:
        assert any(" ".join(map(str, [*row[-3:], *guess])) in text for text in texts)
    elif len(row) >= 3:
        key = " ".join(map(str, row[-3:])) + " "
        assert not any(key in text for text in texts)
