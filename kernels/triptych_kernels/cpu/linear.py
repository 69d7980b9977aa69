"""Products with packed weights by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.weights.adapters import AdapterRef, PanelTable
from triptych_kernels.weights.packed import AdapterOperands, HeadWeight, PackedWeight


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


def head_linear(x: Tensor, weight: HeadWeight) -> Tensor:
    num_heads, out_features, _ = weight.head_shape
    out = torch.empty(len(x), num_heads, out_features, dtype=x.dtype, device=x.device)
    operands = {f"linear_{field}": operand for field, operand in weight.linear_operands(x, out, None).items()}
    operands |= {"linear_out_stride": out.stride(0), "linear_out_features": out_features}
    launch(
        "head_linear", x, **operands, num_heads=num_heads,
        x_head_stride=x.stride(1), out_head_stride=out.stride(1),
    )  # fmt: skip
    return out


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRef) -> Tensor:
    operands = _operands(adapters)
    assert operands is not None
    slots, addresses = operands
    launch("adapt_embedding", x, slots=slots, adapters=addresses, token_ids=token_ids, x=x, size=x.shape[1])
    return x


def _operands(adapters: AdapterRef | None) -> AdapterOperands | None:
    if adapters is None:
        return None
    assert isinstance(adapters.table, PanelTable), "made for this weight"
    return adapters.slots, adapters.table.addresses
