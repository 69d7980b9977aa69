"""Guesses from a row itself: those of a naive search, and work and memory that no row can make large."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_services.worker.runner.drafting import ngram
from triptych_services.worker.runner.drafting.ngram import NgramProposer
from triptych_services.worker.sampling.params import TokenHistory

NUM_LOOKED_AT, MOST_COMMON, TOKENS_PER_COMMON, PAIRS_PER_STEP = 8, 8, 3, 4096


def history_of(*rows: list[int]) -> TokenHistory:
    token_ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for slot, row in enumerate(rows):
        token_ids[slot, : len(row)] = row
    return TokenHistory(token_ids, np.zeros(len(rows), np.int32), np.array(list(map(len, rows)), np.int32))


def guess(proposer: NgramProposer, slots: list[int], limit: int) -> list[list[int]]:
    guesses = proposer.propose(np.array(slots), np.full(len(slots), limit))
    ids = iter(guesses.token_ids.tolist())
    return [[next(ids) for _ in range(count)] for count in guesses.counts.tolist()]


def searched(row: list[int], limit: int) -> list[int]:
    """Return what the proposer should guess, found by looking at all places."""
    places = [place for place in range(2, len(row)) if row[place - 2 : place] == row[-2:]]
    best = max(
        reversed(places[-NUM_LOOKED_AT:]),  # the latest of equals
        key=lambda place: _common(row[:place], row),
        default=None,
    )
    if best is None:
        return []
    follow = row[best:]
    while len(follow) < limit:
        follow = follow + row[best:]
    return follow[: min(limit, _common(row[:best], row) * TOKENS_PER_COMMON)]


def _common(text: list[int], row: list[int]) -> int:
    most = min(len(text), len(row), MOST_COMMON)
    return next((n for n in range(most, 0, -1) if text[-n:] == row[-n:]), 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_guesses_are_those_of_a_naive_search(row: list[int], limit: int) -> None:
    proposer = NgramProposer(1, history=history_of(row))
    assert guess(proposer, [0], limit) == [searched(row, limit)]


@pytest.mark.parametrize("row", [[7] * 20000, [7, 8] * 10000, list(range(20000))])
def test_no_row_makes_a_step_long(row: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows that all hold one pair, two pairs, or none twice: the index grows by so much in a step at most."""
    num_compared = 0
    common_end = ngram.common_end

    def counted(one: list[int], other: list[int]) -> int:
        nonlocal num_compared
        num_compared += 1
        assert max(len(one), len(other)) <= MOST_COMMON
        return common_end(one, other)

    monkeypatch.setattr(ngram, "common_end", counted)
    proposer = NgramProposer(3, history=history_of(row, row, row))
    num_indexed = 0
    for step in range(1, 16):
        guess(proposer, [0, 1, 2], 8)
        sizes = [len(index._before) for index in proposer._indexes]
        assert sum(sizes) - num_indexed <= PAIRS_PER_STEP
        assert num_compared <= 3 * NUM_LOOKED_AT * step
        num_indexed = sum(sizes)
        assert all(len(index._latest) <= len(index._before) for index in proposer._indexes)
    assert num_indexed == 3 * (len(row) - 2), "and all of it is known in the end"
    proposer.leave(0)
    assert not proposer._indexes[0]._before
