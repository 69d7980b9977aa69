"""The first half of a gated MLP with a packed weight."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.weights.packed import PackedWeight


def gated_linear(x: Tensor, weight: PackedWeight, bias: None, activation: str) -> Tensor:
    return weight.multiply(x, x.dtype, activation)
