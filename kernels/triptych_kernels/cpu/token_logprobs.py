"""Log-probabilities on CPUs: one pass over a row, then a look into the blocks that hold its best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = len(rows)
    chosen_logprobs = torch.empty(num_rows)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    top_logprobs = torch.empty(num_rows, num_top)
    launch(
        "token_logprobs", rows,
        logits, logits.stride(0), logits.shape[1], rows.contiguous(), token_ids.contiguous(), num_top,
        chosen_logprobs, ranks, top_ids, top_logprobs,
    )  # fmt: skip
    return chosen_logprobs, ranks, top_ids, top_logprobs
