"""The first half of a gated MLP, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.reference.linear import linear


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, up = linear(x, weight, bias, torch.float64).chunk(2, dim=-1)
    if activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gate = 0.5 * gate * (1 + torch.tanh(inner))
    return (gate * up).to(x.dtype)
