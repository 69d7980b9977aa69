"""The log-probabilities of streams that may go on elsewhere: which rows are remembered, and in how many bytes."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest

from triptych.errors import NotKept
from triptych.types.step import U32, LogprobColumns, empty_u32
from triptych_services.enginecore.frontends.kept_logprobs import KeptLogprobs

MINE, OTHER, PLAIN = (1, 1), (2, 1), (1, 2)


def u32(*values: int) -> U32:
    return np.array(values, np.uint32)


def columns(rows: list[int], counts: list[int], first: int) -> LogprobColumns:
    """Row r has candidates `first` + 10 r, and so on."""
    candidates = [
        first + 10 * row + place for row, count in zip(rows, counts, strict=True) for place in range(count)
    ]
    offsets = np.cumsum([0, *counts]).astype(np.uint32)
    values = np.array(candidates, np.float32)
    return LogprobColumns(u32(*rows), offsets, u32(*candidates), -values, u32(*(row + 1 for row in rows)))


def note(kept: KeptLogprobs, step: int, *, counts: tuple[int, int] = (2, 3)) -> None:
    """A step with one token of each of three choices, of which the first and the last want log-probabilities."""
    sessions, numbers = np.array([1, 1, 2], np.int64), u32(1, 2, 1)
    kept.note_step(sessions, numbers, empty_u32(), columns([0, 2], list(counts), 100 * step))


def found(kept: KeptLogprobs, key: tuple[int, int], count: int) -> list[tuple[list[int], list[float], int]]:
    entries = kept.last_of(key, count)
    assert all(entry.rows.tolist() == [0] for entry in entries)
    assert all(entry.offsets.tolist() == [0, len(entry.token_ids)] for entry in entries)
    return [(e.token_ids.tolist(), e.logprobs.tolist(), int(e.ranks[0])) for e in entries]


def test_each_choice_has_its_own_tokens() -> None:
    kept = KeptLogprobs()
    kept.add([MINE, OTHER])
    for step in (1, 2, 3):
        note(kept, step)
    assert found(kept, MINE, 2) == [([200, 201], [-200, -201], 1), ([300, 301], [-300, -301], 1)]
    assert found(kept, OTHER, 1) == [([320, 321, 322], [-320, -321, -322], 3)]
    assert found(kept, MINE, 0) == []
    with pytest.raises(NotKept):
        kept.last_of(MINE, 4)
    with pytest.raises(NotKept):
        kept.last_of(PLAIN, 1)


def test_several_tokens_of_a_step_belong_to_their_choice() -> None:
    kept = KeptLogprobs()
    kept.add([MINE, OTHER])
    kept.note_step(np.array([1, 2], np.int64), u32(1, 1), u32(2, 1), columns([0, 1, 2], [1, 1, 1], 0))
    assert found(kept, MINE, 2) == [([0], [0], 1), ([10], [-10], 2)]
    assert found(kept, OTHER, 1) == [([20], [-20], 3)]


def test_what_is_forgotten_holds_nothing() -> None:
    kept = KeptLogprobs()
    kept.add([MINE, OTHER])
    note(kept, 1)
    kept.forget([OTHER, PLAIN])
    note(kept, 2)
    assert len(found(kept, MINE, 2)) == 2
    kept.forget([MINE])
    assert (bool(kept), kept.num_bytes) == (False, 0)


def test_the_choice_with_most_loses_its_older_half() -> None:
    kept = KeptLogprobs(max_bytes=8 << 10)
    kept.add([MINE, OTHER])
    for step in range(200):
        note(kept, step, counts=(1, 8))
        assert kept.num_bytes <= 8 << 10
    assert len(found(kept, MINE, 100)) == 100
    with pytest.raises(NotKept):
        kept.last_of(OTHER, 100)
    last = 100 * 199 + 20
    assert found(kept, OTHER, 1)[0][0] == list(range(last, last + 8))


@pytest.mark.parametrize("num_rows", [16, 1024])
def test_the_bytes_that_are_counted_are_those_that_are_held(num_rows: int) -> None:
    """One row of many wants log-probabilities."""
    num_steps = 2000
    kept = KeptLogprobs()
    kept.add([MINE])
    sessions, numbers = np.ones(num_rows, np.int64), np.arange(1, num_rows + 1, dtype=np.uint32)
    entry = columns([0], [1], 7)
    tracemalloc.start()
    for _ in range(num_steps):
        kept.note_step(sessions, numbers, empty_u32(), entry)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 1.1 * kept.num_bytes + sys.getsizeof([])
    assert kept.num_bytes < 30 * num_steps
