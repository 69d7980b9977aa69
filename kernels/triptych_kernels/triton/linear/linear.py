"""Products with weights in 8 bits or fewer, and with plain ones for few rows if that is measured to beat cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.torch.elementwise import activate
from triptych_kernels.torch.linear import linear as torch_linear
from triptych_kernels.triton.linear.adapters import add_adapters
from triptych_kernels.triton.linear.few_rows import linear_tiles, multiply_few_rows
from triptych_kernels.weights.adapters import AdapterRef
from triptych_kernels.weights.base import LinearWeight


def linear(
    x: Tensor,
    weight: Tensor | LinearWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    adapters: AdapterRef | None = None,
) -> Tensor:
    if adapters is not None:
        # the same product as without adapters, so that rows that have none get the same bits
        out = linear(x, weight, bias, out_dtype, None).contiguous()
        add_adapters(out, x, adapters)
        return out if activation is None else activate(out.float(), activation).to(out_dtype)
    if isinstance(weight, LinearWeight):
        return weight.multiply(x, out_dtype, activation)
    tiles = linear_tiles(x, weight)
    if tiles is None:
        return torch_linear(x, weight, bias, out_dtype, activation)
    return multiply_few_rows(x, weight, bias, out_dtype, activation, tiles)
