"""The input of one step, gathered from the rows; decode inputs come from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
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


def gather_input_batch(rows: RequestRows, step: StepRows, device: torch.device) -> InputBatch:
    """Gather the tokens, positions and blocks of a step with at least one row; a loop-free pass over columns.

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
    block_ids = rows.block_table[slot_of_token, positions // rows.block_size].astype(np.int64)
    slot_mapping = block_ids * rows.block_size + positions % rows.block_size
    slot_mapping[positions < rows.write_start[slot_of_token]] = -1
    max_blocks = -(-max_seq_len // rows.block_size)

    attention = AttentionBatch(
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
        block_tables=torch.from_numpy(rows.block_table[slots, :max_blocks]).to(device),
        query_starts=torch.from_numpy(query_starts.astype(np.int32)).to(device),
        seq_lens=torch.from_numpy(ends.astype(np.int32)).to(device),
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
        query_lens_list=tuple(query_lens.tolist()),
        seq_lens_list=tuple(ends.tolist()),
    )
    token_ids = rows.token_ids[slot_of_token, positions].astype(np.int64)
    sampling_tokens = query_starts[1:][step.samples] - 1
    return InputBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=attention,
        sampling_tokens=torch.from_numpy(sampling_tokens).to(device),
    )
