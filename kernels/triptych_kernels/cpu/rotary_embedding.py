"""Rotary position embedding on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    launch(
        "rotary_embedding", positions, DTYPES[query.dtype],
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1), positions, cos_sin_cache,
        query_out, key_out, query.shape[1], key.shape[1], query.shape[2],
    )  # fmt: skip
    return query_out, key_out
