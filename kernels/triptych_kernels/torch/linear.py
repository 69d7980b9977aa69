"""Products with plain weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triptych_kernels.torch.elementwise import activate, activate_gated


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, activation: str | None
) -> Tensor:
    if out_dtype != x.dtype and x.device.type == "cuda" and bias is None and len(x):
        # float32 sums as they are; else they would be rounded to 16 bits first, and take a second pass
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        out = functional.linear(x, weight, bias).to(out_dtype)
    return out if activation is None else activate(out, activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return activate_gated(functional.linear(x, weight, bias), activation)
