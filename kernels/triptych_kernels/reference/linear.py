"""Products in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(out_dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, up = linear(x, weight, bias, torch.float64).chunk(2, dim=-1)
    if activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gate = 0.5 * gate * (1 + torch.tanh(inner))
    return (gate * up).to(x.dtype)
