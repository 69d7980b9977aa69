"""Products with plain weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.torch.elementwise import activate, activate_gated
from triptych_kernels.weights.adapters import AdapterRef, StackedTable


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    adapters: AdapterRef | None = None,
) -> Tensor:
    if adapters is not None:
        adapted = _adapted(x, weight, bias, adapters)
        return (adapted if activation is None else activate(adapted, activation)).to(out_dtype)
    if out_dtype != x.dtype and x.device.type == "cuda" and bias is None and len(x):
        # float32 sums as they are; else they would be rounded to 16 bits first, and take a second pass
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        out = functional.linear(x, weight, bias).to(out_dtype)
    return out if activation is None else activate(out, activation)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    adapters: AdapterRef | None = None,
) -> Tensor:
    if adapters is not None:
        return activate_gated(_adapted(x, weight, bias, adapters), activation).to(x.dtype)
    return activate_gated(functional.linear(x, weight, bias), activation)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRef) -> Tensor:
    assert isinstance(adapters.table, StackedTable), "made for this weight"
    return x.add_(adapters.table.delta(token_ids, adapters.slots))


def _adapted(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: AdapterRef) -> Tensor:
    """Return the product in float32 with what each row's adapter adds to it."""
    assert isinstance(adapters.table, StackedTable), "made for this weight"
    return functional.linear(x, weight, bias).float() + adapters.table.delta(x, adapters.slots)
