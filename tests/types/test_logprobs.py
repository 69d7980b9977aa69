"""Columns of log-probabilities are sequences of positions."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.types.logprobs import Logprob, LogprobRows, TokenLogprobs


def entries(num_rows: int, num_top: int, *, is_named: bool = False) -> list[TokenLogprobs]:
    return [
        TokenLogprobs.of(
            Logprob(row, -1.5 - row, f"t{row}", 7),
            [Logprob(top, -0.5 * top, f"t{top}", 0 if is_named else top) for top in range(1, num_top + 1)],
        )
        for row in range(num_rows)
    ]


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("is_named", [False, True])
def test_positions_are_those_that_columns_were_made_of(num_top: int, is_named: bool) -> None:
    plain = entries(4, num_top, is_named=is_named)
    rows = LogprobRows.of(plain)
    assert LogprobRows.of(rows) is rows
    assert [list(row.items()) for row in rows] == [list(row.items()) for row in plain]
    assert [row.ranks for row in rows] == [row.ranks for row in plain]
    assert list(rows[-1].items()) == list(plain[-1].items())
    with pytest.raises(IndexError):
        rows[4]


@pytest.mark.parametrize("has_lookup", [False, True])
def test_parts_join_to_the_whole(has_lookup: bool) -> None:
    plain = entries(5, 2)
    rows = LogprobRows.of(plain)
    if has_lookup:
        rows = LogprobRows(3, rows.token_ids, rows.logprobs, rows.ranks, lambda token_id: b"t%d" % token_id)
    parts = [rows[:2], rows[2:3], rows[3:3], rows[3:]]
    assert [len(part) for part in parts] == [2, 1, 0, 2]
    joined = LogprobRows.joined(parts)
    assert [list(row.items()) for row in joined] == [list(row.items()) for row in plain]
    assert LogprobRows.joined([rows]) is rows
    assert np.array_equal(joined.logprobs, rows.logprobs)
