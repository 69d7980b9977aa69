"""The input of one step, gathered from the rows; decode inputs come from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.attention.base import AttentionBatch
from services.worker.runner.request_rows import RequestRows, StepRows


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """What a forward pass reads; tensors on the rank's device."""

    token_ids: Tensor
    """[num_tokens] int64; the tokens of a row are contiguous, rows in ascending slot order."""
    positions: Tensor
    """[num_tokens] int64, index of each token in its sequence."""
    attention: AttentionBatch
    sampling_tokens: Tensor
    """[num_sampling] int64, the last token of each sampling row: the hidden states that become logits."""

    @property
    def num_sampling(self) -> int:
        return self.sampling_tokens.shape[0]


class InputBuffers:
    """Where steps are written before the model reads them: allocated once, as long as the longest step.

    A batch on a CPU is a view of these buffers, so it holds until the next one is gathered; a recorded program
    reads the buffers themselves.
    """

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int, device: torch.device
    ) -> None:
        self._device = device
        self.token_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.query_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.sampling_tokens = torch.zeros(max_num_seqs, dtype=torch.int64)

    def gather(self, rows: RequestRows, step: StepRows) -> InputBatch:
        """The tokens, positions and blocks of a step with at least one row; a loop-free pass over columns.

        The one reader of token ids: a backend that keeps sampled tokens on its device overrides the ids of
        single-token rows after this.
        """
        slots, query_lens, starts = step.slots, step.query_lens, step.starts
        ends = starts + query_lens  # [num_rows] = length of keys and values
        query_starts = np.zeros(slots.size + 1, np.int64)
        np.cumsum(query_lens, out=query_starts[1:])
        num_tokens, max_seq_len = int(query_starts[-1]), int(ends.max())

        row_of_token = np.repeat(np.arange(slots.size), query_lens)  # [num_tokens]
        positions = np.arange(num_tokens) + (starts - query_starts[:-1])[row_of_token]
        slot_of_token = slots[row_of_token]
        blocks, offsets = np.divmod(positions, rows.block_size)
        slot_mapping = rows.block_table[slot_of_token, blocks] * np.int64(rows.block_size) + offsets
        slot_mapping[positions < rows.write_start[slot_of_token]] = -1
        max_blocks = -(-max_seq_len // rows.block_size)

        attention = AttentionBatch(
            slot_mapping=self._write(self.slot_mapping, slot_mapping),
            block_tables=self._write(self.block_tables, rows.block_table[slots, :max_blocks]),
            query_starts=self._write(self.query_starts, query_starts),
            seq_lens=self._write(self.seq_lens, ends),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
            query_lens_list=tuple(query_lens.tolist()),
            seq_lens_list=tuple(ends.tolist()),
        )
        return InputBatch(
            token_ids=self._write(self.token_ids, rows.token_ids[slot_of_token, positions]),
            positions=self._write(self.positions, positions),
            attention=attention,
            sampling_tokens=self._write(self.sampling_tokens, query_starts[1:][step.samples] - 1),
        )

    def _write(self, buffer: Tensor, values: NDArray[np.integer]) -> Tensor:
        """Put values at the beginning of a buffer; that part of it, on the device."""
        part = buffer[tuple(slice(size) for size in values.shape)]
        part.numpy()[...] = values
        return part.to(self._device)
