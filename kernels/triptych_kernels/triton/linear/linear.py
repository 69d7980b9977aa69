"""Products with weights in 8 bits or fewer, and with plain ones for few rows if that is measured to beat cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.torch.elementwise import activate
from triptych_kernels.torch.linear import linear as torch_linear
from triptych_kernels.triton.linear.adapters import multiply_adapted
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
        assert isinstance(weight, Tensor), "others have no `StackedTable`"
        adapted = multiply_adapted(x, weight, bias, adapters)
        return (adapted if activation is None else activate(adapted, activation)).to(out_dtype)
    if isinstance(weight, LinearWeight):
        return weight.multiply(x, out_dtype, activation)
    tiles = linear_tiles(x, weight)
    if tiles is None:
        return torch_linear(x, weight, bias, out_dtype, activation)
    return multiply_few_rows(x, weight, bias, out_dtype, activation, tiles)
