"""Products, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(out_dtype)
