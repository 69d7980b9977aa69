"""The first half of a gated MLP: cuBLAS for the product, then one pass for the activation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from triptych_kernels.held_weight import HeldWeight
from triptych_kernels.triton.silu_and_mul import gate_and_mul


def gated_linear(x: Tensor, weight: Tensor | HeldWeight, bias: Tensor | None, activation: str) -> Tensor:
    if isinstance(weight, HeldWeight):
        return weight.multiply(x, x.dtype, activation)
    return gate_and_mul(functional.linear(x, weight, bias), activation)
