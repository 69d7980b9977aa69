"""Weights of linear layers in the form of an implementation under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.ops.implementations import Implementation
from triptych_kernels.triton.linear.few_rows import ByTorch, Tiles
from triptych_kernels.triton.tuning.tunable import Tunable
from triptych_kernels.weights.packed import PackedWeight


def random(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def weight_for(
    implementation: Implementation, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> dict[str, Any]:
    """Return the weight and its bias as an op takes them: plain, or packed for native kernels in two parts."""
    if not implementation.isa:
        return {"weight": weight, "bias": bias}
    packed = PackedWeight(*weight.shape, weight.dtype, gated=gated, bias=bias is not None)
    fill_weight(packed, weight, bias)
    return {"weight": packed}


def fill_weight(packed: PackedWeight, weight: Tensor, bias: Tensor | None = None) -> None:
    """Fill a weight in two parts, so that rows begin within a panel."""
    halves = ("gate", "up") if packed.gated else (None,)
    size = len(weight) // len(halves)
    for index, half in enumerate(halves):
        rows = slice(index * size, (index + 1) * size)
        packed.fill_rows(0, weight[rows][: size // 3], half)
        packed.fill_rows(size // 3, weight[rows][size // 3 :], half)
        if bias is not None:
            packed.fill_bias(0, bias[rows][: size // 2], half)
            packed.fill_bias(size // 2, bias[rows][size // 2 :], half)


def tiles_of_each_width(tunable: Tunable[Tiles | ByTorch], weight: Tensor) -> list[Tiles]:
    """Return one candidate of each width for products of few rows, whole and with splits."""
    candidates = tunable.candidates(*weight.shape, weight.dtype, 16)
    return list({(t.block_n, t.num_splits): t for t in candidates if isinstance(t, Tiles)}.values())
