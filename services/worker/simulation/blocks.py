"""The KV blocks of a simulated worker: one number per token, which depends on all tokens before it.

So blocks can be transferred, and a request that reads blocks of another prefix is noticed, where a real model would
only answer something else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.worker.runner.request_rows import RequestRows, StepRows
from triptych.types.step import NewRow, RowError, RowKey

U64 = NDArray[np.uint64]

_BASE = np.uint64(0x5851F42D4C957F2D)
_NOT_TOLD = np.uint64(0)
"""Content at positions of sampled tokens, whose ids a simulated worker does not keep. It passes for any."""


class SimulatedBlocks:
    """A `BlockStore`, for a worker that takes part in transfers. Owned by its runner, which writes it in each step."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._content: U64 = np.zeros((num_blocks, block_size), np.uint64)
        self._block_size = block_size
        self.block_bytes = block_size * self._content.itemsize
        self._powers: U64 = np.cumprod(np.full(max_model_len, _BASE, np.uint64), dtype=np.uint64)
        """[max_model_len] factor of the token at each position."""

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bytes_of(block)[offset : offset + len(buffer)]

    def write(self, block: int, offset: int, content: memoryview) -> None:
        self._bytes_of(block)[offset : offset + len(content)] = content

    def write_step(self, rows: RequestRows, step: StepRows, num_entered_with: NDArray[np.int64]) -> None:
        """Write what a step computes.

        Args:
            num_entered_with: [max_num_seqs] tokens that each row knew when it entered.
        """
        ends = step.starts + step.query_lens
        if step.sample_limits is not None:
            ends[step.samples] += step.sample_limits - 1
        starts = np.maximum(step.starts, rows.write_start[step.slots])
        for slot, start, end in zip(step.slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            positions = np.arange(start, end)
            blocks = rows.block_table[slot, positions // self._block_size]
            content = np.full(len(positions), _NOT_TOLD)
            num_told = int(np.clip(num_entered_with[slot] - start, 0, len(positions)))
            if num_told:
                content[:num_told] = self._names_of(rows.token_ids[slot, : start + num_told])[start:]
            self._content[blocks, positions % self._block_size] = content

    def check(self, new_rows: Iterable[NewRow]) -> dict[RowKey, RowError]:
        """Return the rows whose cached blocks do not hold the KV of their own tokens."""
        errors = {}
        for row in new_rows:
            count = row.num_computed_tokens
            if not count:
                continue
            content = self._content[row.block_ids.astype(np.int64)].reshape(-1)[:count]
            names = self._names_of(row.token_ids[:count])
            wrong = np.flatnonzero((content != names) & (content != _NOT_TOLD))
            if len(wrong):
                errors[row.key] = RowError(f"position {wrong[0]} holds the KV of another prefix")
        return errors

    def _names_of(self, token_ids: NDArray[np.integer]) -> U64:
        """Return one number per position, for that token and all before it; never `_NOT_TOLD`."""
        terms = (token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[: len(token_ids)]
        return np.cumsum(terms, dtype=np.uint64) | np.uint64(1)

    def _bytes_of(self, block: int) -> memoryview:
        return memoryview(self._content[block]).cast("B")
