"""Guesses from outputs of the same scope."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tests.worker.tiny import new_row
from triptych.types.step import NewRow, RowContent
from triptych_services.worker.runner.drafting.suffix import SuffixProposer
from triptych_services.worker.sampling.params import TokenHistory

NUM_SLOTS, LENGTH, TOKENS_PER_STEP = 3, 6000, 256
NO_ROWS = np.zeros(0, np.int64)
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
        for _ in range(-(-len(output) // TOKENS_PER_STEP)):
            self.step()

    def step(self) -> None:
        """Let the proposer do what it does in each step."""
        self.proposer.accept(NO_ROWS, NO_ROWS)

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
    rows.step()
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
    rows = Rows(max_bytes=36 * 100)  # a hundred tokens
    rows.say(range(1000, 1040), "a")
    rows.say(range(2000, 2040), "b")
    assert rows.guess([1005, 1006, 1007], "a", limit=1) == [1008]
    rows.say(range(3000, 3040), "b")  # does not fit behind them
    assert rows.guess([1005, 1006, 1007], "a") == []
    assert rows.guess([2005, 2006, 2007], "b", limit=1) == [2008]
    assert rows.guess([3005, 3006, 3007], "b", limit=1) == [3008]
    rows.say(range(4000, 4040), "a")
    assert rows.guess([2005, 2006, 2007], "b") == []
    rows.say(range(5000, 5100), "b")
    assert rows.guess([5005, 5006, 5007], "b") == [], "as long as all that is kept"
    assert rows.guess([4005, 4006, 4007], "a", limit=1) == [4008]


def test_a_step_takes_in_few_tokens_however_many_rows_have_ended() -> None:
    rows = Rows(max_bytes=36 << 16)
    outputs = [range(5000 * number, 5000 * number + 4500) for number in range(1, 9)]
    for output in outputs:
        rows.enter(2, [0, *output], "a")
        rows.proposer.leave(2)
    num_known = [0]
    for _ in range(8 * 4096 // TOKENS_PER_STEP):
        rows.step()
        found = [rows.guess(list(output)[-4:-1], "a") == [output[-1]] for output in outputs]
        num_known.append(sum(found))
    ends = [step for step, (before, after) in enumerate(pairwise(num_known), 1) if after > before]
    assert ends == [16 * number for number in range(1, 9)], "one output of 4,096 tokens in 16 steps"


def test_the_newest_outputs_wait() -> None:
    """Those of 64 rows of 4,096 tokens; the oldest are left out."""
    rows = Rows(max_bytes=36 << 20)
    outputs = [range(5000 * number, 5000 * number + 4096) for number in range(1, 71)]
    for output in outputs:
        rows.enter(2, [0, *output], "a")
        rows.proposer.leave(2)
    for _ in range(80 * 16):
        rows.step()
    found = [rows.guess(list(output)[:3], "a", 1) == [output[3]] for output in outputs]
    assert found == [False] * 6 + [True] * 64


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=20), st.randoms(use_true_random=False))
def test_what_is_found_was_among_the_latest_tokens(lengths: list[int], random: Random) -> None:
    """Outputs of any length, also while they are taken in; none is overwritten in part and found."""
    rows = Rows(max_bytes=36 * 64)
    texts = list[list[int]]()
    for number, length in enumerate(lengths):
        texts.append([1000 * number + place for place in range(length)])
        rows.enter(2, [0, *texts[-1]], "a")
        rows.proposer.leave(2)
        if random.random() < 0.7:
            rows.step()
        for text in texts:
            for end in (3, len(text) // 2, len(text) - 1):
                guess = rows.guess(text[:end], "a", 4)
                assert guess == text[max(end, 0) :][: len(guess)]
    rows.step()
    taken = [text for text in texts if 3 < len(text) < 64]
    if taken:
        assert rows.guess(taken[-1][:3], "a", 1) == taken[-1][3:4]


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
