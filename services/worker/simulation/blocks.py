"""The KV blocks of a simulated worker: one number per token, which depends on all tokens before it.

So blocks can be transferred, and a request that reads blocks of another prefix is noticed, where a real model would
only answer something else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from triptych.types.step import NewRow, RowError, RowKey
from triptych_services.worker.runner.request_rows import I64, RequestRows, StepRows
from triptych_services.worker.simulation.hashing import BASE, U64, salt_of

_WRONG = np.uint64(0)
"""Content at positions of guesses that were wrong, which is the name of no token."""


class SimulatedBlocks:
    """A `BlockStore`, for a worker that takes part in transfers. Owned by its runner, which writes it in each step."""

    def __init__(self, rows: RequestRows, num_blocks: int) -> None:
        """`rows`: hold the ids of all known tokens, the sampled ones included."""
        max_num_seqs, max_model_len = rows.token_ids.shape
        self._rows = rows
        self._table = table = rows.tables[0]
        self._block_size = block_size = table.block_size
        self._content: U64 = np.zeros((num_blocks, block_size), np.uint64)
        self._powers: U64 = np.cumprod(np.full(max_model_len, BASE, np.uint64), dtype=np.uint64)
        """[max_model_len] factor of the token at each position."""
        self._sums: U64 = np.zeros(max_num_seqs, np.uint64)
        """[max_num_seqs] sum of the terms of each row's tokens that have been computed."""
        self._salts: U64 = np.zeros(max_num_seqs, np.uint64)
        """[max_num_seqs] number of each row's adapter, from which its sums begin."""
        self._block_names: U64 = np.zeros(table.ids.shape, np.uint64)
        """[max_num_seqs, max_blocks] name of the last token of each full block of a row."""

    def num_bytes(self, block: int) -> int:
        return self._content[block].nbytes

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bytes_of(block)[offset : offset + len(buffer)]

    def write(self, block: int, offset: int, content: memoryview) -> None:
        self._bytes_of(block)[offset : offset + len(content)] = content

    def compute(self, step: StepRows, new_rows: Iterable[NewRow]) -> dict[RowKey, RowError]:
        """Write what a step computes, and check what it reads. The step's tokens are recorded and counted already.

        All writes of a step come before the reads of the rows that enter with it.

        Returns:
            The rows that read the KV of another prefix.
        """
        new_rows = list(new_rows)
        for row in new_rows:
            self._enter(row)
        is_new = np.isin(step.slots, [row.slot for row in new_rows])
        errors = self._check_running(step.slots[~is_new], step.starts[~is_new])
        ends = step.starts + step.query_lens
        if step.sample_limits is not None:
            ends[step.samples] += step.sample_limits - 1
        columns = step.slots.tolist(), step.starts.tolist(), ends.tolist()
        for slot, start, end in zip(*columns, strict=True):
            self._write_row(slot, start, end)
        for row in new_rows:
            if (error := self._check_new(row)) is not None:
                errors[row.key] = error
        return errors

    def _enter(self, row: NewRow) -> None:
        """Note the names of the tokens that a new row need not compute."""
        self._salts[row.slot] = salt_of(row.content.adapter)
        names, total = self._name(row.slot, 0, row.num_computed_tokens, self._salts[row.slot])
        self._sums[row.slot] = total
        self._note_full_blocks(row.slot, 0, names)

    def _write_row(self, slot: int, start: int, end: int) -> None:
        """Write a row's positions `start` to `end`; guesses that were wrong at its end are not counted as computed."""
        num_computed = int(self._rows.num_computed[slot])
        names, self._sums[slot] = self._name(slot, start, num_computed, self._sums[slot])
        self._note_full_blocks(slot, start, names)
        content = np.concatenate((names, np.full(end - num_computed, _WRONG)))
        first = max(start, int(self._rows.write_start[slot]))
        positions = np.arange(first, end)
        blocks = self._table.ids[slot, positions // self._block_size]
        self._content[blocks, positions % self._block_size] = content[first - start :]

    def _check_running(self, slots: I64, starts: I64) -> dict[RowKey, RowError]:
        """Return the rows with something else in their blocks than they have written or found there.

        One position of each block is looked at, and the last one: a row that overwrites blocks overwrites them whole.

        Args:
            slots: [num_rows] rows that have computed tokens.
            starts: [num_rows] how many.
        """
        last = starts - 1
        blocks = self._table.ids[slots, last // self._block_size]
        wrong = self._content[blocks, last % self._block_size] != self._sums[slots] | np.uint64(1)
        num_full: I64 = starts // self._block_size
        width = int(num_full.max(initial=0))
        is_full = np.arange(width) < num_full[:, None]  # [num_rows, width]
        found = self._content[self._table.ids[slots, :width], self._block_size - 1]
        wrong |= (is_full & (found != self._block_names[slots, :width])).any(axis=1)
        return {
            self._rows.key_of(slot): RowError(f"a position below {start} holds the KV of another prefix")
            for slot, start in zip(slots[wrong].tolist(), starts[wrong].tolist(), strict=True)
        }

    def _check_new(self, row: NewRow) -> RowError | None:
        """Return the error of a row that enters, if its cached blocks do not hold the KV of its own tokens."""
        count = row.num_computed_tokens
        names, _ = self._name(row.slot, 0, count, self._salts[row.slot])
        content = self._content[row.block_ids.astype(np.int64)].reshape(-1)[:count]
        wrong = np.flatnonzero(content != names)
        return RowError(f"position {wrong[0]} holds the KV of another prefix") if len(wrong) else None

    def _name(self, slot: int, start: int, end: int, total: np.uint64) -> tuple[U64, np.uint64]:
        """Return one number per position of a row, for that token and all before it; never `_WRONG`.

        Args:
            total: Sum of the terms before `start`.

        Returns:
            [end - start] the numbers, and the sum of the terms before `end`.
        """
        if end <= start:
            return np.empty(0, np.uint64), total
        terms = (self._rows.token_ids[slot, start:end].astype(np.uint64) + np.uint64(1)) * self._powers[
            start:end
        ]
        sums = np.cumsum(terms, dtype=np.uint64) + total
        return sums | np.uint64(1), sums[-1]

    def _note_full_blocks(self, slot: int, start: int, names: U64) -> None:
        """Note the names, of positions from `start` on, that are the last ones of their blocks."""
        first = -(start + 1) % self._block_size
        at_ends = names[first :: self._block_size]
        first_block = (start + first) // self._block_size
        self._block_names[slot, first_block : first_block + len(at_ends)] = at_ends

    def _bytes_of(self, block: int) -> memoryview:
        return memoryview(self._content[block]).cast("B")
