"""Products with packed weights by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.weights.packed import PackedWeight


def linear(
    x: Tensor, weight: PackedWeight, bias: None, out_dtype: torch.dtype, activation: str | None
) -> Tensor:
    return weight.multiply(x, out_dtype, activation)


def gated_linear(x: Tensor, weight: PackedWeight, bias: None, activation: str) -> Tensor:
    return weight.multiply(x, x.dtype, activation)
