"""Products in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, activation: str | None
) -> Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product = product + bias.double()
    return (product if activation is None else activate(product, activation)).to(out_dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, up = linear(x, weight, bias, torch.float64, None).chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)).to(x.dtype)
    return (activate(gate, activation) * up).to(x.dtype)


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
