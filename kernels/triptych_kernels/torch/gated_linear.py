"""The first half of a gated MLP in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from triptych_kernels.torch.silu_and_mul import silu_and_mul


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    projected = functional.linear(x, weight, bias)
    if activation == "silu":
        return silu_and_mul(projected)
    gate, up = projected.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
