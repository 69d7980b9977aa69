"""Products with packed weights by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.weights.adapters import AdapterRef, PanelTable
from triptych_kernels.weights.packed import AdapterOperands, PackedWeight


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: None,
    out_dtype: torch.dtype,
    activation: str | None,
    adapters: AdapterRef | None = None,
) -> Tensor:
    return weight.multiply(x, out_dtype, activation, _operands(adapters))


def gated_linear(
    x: Tensor, weight: PackedWeight, bias: None, activation: str, adapters: AdapterRef | None = None
) -> Tensor:
    return weight.multiply(x, x.dtype, activation, _operands(adapters))


def _operands(adapters: AdapterRef | None) -> AdapterOperands | None:
    if adapters is None:
        return None
    assert isinstance(adapters.table, PanelTable), "made for this weight"
    return adapters.slots, adapters.table.addresses
