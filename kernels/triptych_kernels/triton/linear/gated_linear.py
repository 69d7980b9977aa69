"""The first half of a gated MLP: one kernel for few rows if it is measured to beat cuBLAS, else cuBLAS and a pass."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from triptych_kernels.triton.elementwise.silu_and_mul import gate_and_mul
from triptych_kernels.triton.linear.adapters import add_adapters
from triptych_kernels.triton.linear.few_rows import gated_linear_tiles, multiply_few_rows
from triptych_kernels.triton.linear.linear import linear
from triptych_kernels.weights.adapters import AdapterRef
from triptych_kernels.weights.base import LinearWeight


def gated_linear(
    x: Tensor,
    weight: Tensor | LinearWeight,
    bias: Tensor | None,
    activation: str,
    adapters: AdapterRef | None = None,
) -> Tensor:
    if adapters is not None:
        gate_up = linear(x, weight, bias, x.dtype, None)
        add_adapters(gate_up, x, adapters)
        return gate_and_mul(gate_up, activation)
    if isinstance(weight, LinearWeight):
        return weight.multiply(x, x.dtype, activation)
    tiles = gated_linear_tiles(x, weight)
    if tiles is None:
        return gate_and_mul(functional.linear(x, weight, bias), activation)
    return multiply_few_rows(x, weight, bias, x.dtype, activation, tiles, gated=True)
