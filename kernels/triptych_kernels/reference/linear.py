"""Products in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.weights.adapters import AdapterRef, StackedTable


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    adapters: AdapterRef | None = None,
) -> Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product = product + bias.double()
    if adapters is not None:
        product = product + _adapted(x.double(), adapters)
    return (product if activation is None else activate(product, activation)).to(out_dtype)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=x.dtype)
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            out[row, head] = weight[head].double() @ x[row, head].double()
    return out


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, adapters: AdapterRef | None = None
) -> Tensor:
    gate, up = linear(x, weight, bias, torch.float64, None, adapters).chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)).to(x.dtype)
    return (activate(gate, activation) * up).to(x.dtype)


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRef) -> Tensor:
    assert isinstance(adapters.table, StackedTable), "the only form that is read here"
    chosen = functional.one_hot(token_ids, adapters.table.in_features).double()
    return x.add_(_adapted(chosen, adapters))


def _adapted(x: Tensor, adapters: AdapterRef) -> Tensor:
    """Return what is added to each row, row by row."""
    table = adapters.table
    assert isinstance(table, StackedTable), "the only form that is read here"
    deltas = [
        row @ table.a[slot].double().T @ table.b[slot].double()
        if slot >= 0
        else torch.zeros(table.b.shape[2], dtype=torch.float64)
        for row, slot in zip(x, adapters.slots.tolist(), strict=True)
    ]
    return torch.stack(deltas)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply one of `ops.linear.ACTIVATIONS`."""
    match activation:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_pytorch_tanh":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return 0.5 * x * (1 + torch.tanh(inner))
        case "relu":
            return torch.where(x > 0, x, 0.0)
        case "relu2":
            return torch.where(x > 0, x * x, 0.0)
        case "quick_gelu":
            return x / (1 + torch.exp(-1.702 * x))
    raise AssertionError(activation)
