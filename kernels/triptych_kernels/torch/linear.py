"""Products with plain weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.torch.elementwise import silu_and_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if out_dtype != x.dtype and x.device.type == "cuda" and bias is None and len(x):
        # float32 sums as they are; else they would be rounded to 16 bits first, and take a second pass
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return functional.linear(x, weight, bias).to(out_dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    projected = functional.linear(x, weight, bias)
    if activation == "silu":
        return silu_and_mul(projected)
    gate, up = projected.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
