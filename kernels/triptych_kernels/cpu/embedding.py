"""Looking up tokens in a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.packed_weight import PackedWeight


def embedding(token_ids: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    return weight.rows(token_ids, out_dtype)
