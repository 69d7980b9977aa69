"""Choosing the next token on CPUs: thresholds without sorting, noise only for tokens that can win."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    columns = (temperature, top_k, top_p, min_p, seeds, positions)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(
        "sample", logits,
        logits, logits.stride(0), logits.shape[1], *(column.contiguous() for column in columns), token_ids,
    )  # fmt: skip
    return token_ids
