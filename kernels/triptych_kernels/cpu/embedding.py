"""Looking up tokens in a weight, plain or packed."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES
from triptych_kernels.weights.packed import PackedWeight


def embedding(token_ids: Tensor, weight: Tensor | PackedWeight, out_dtype: torch.dtype) -> Tensor:
    if isinstance(weight, PackedWeight):
        return weight.rows(token_ids, out_dtype)
    out = torch.empty(len(token_ids), weight.shape[1], dtype=out_dtype, device=token_ids.device)
    launch(
        "embedding", token_ids, DTYPES[weight.dtype], DTYPES[out_dtype], False,
        weight, token_ids, out, weight.shape[1],
    )  # fmt: skip
    return out
