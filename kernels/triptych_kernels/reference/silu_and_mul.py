"""The gated activation of a Llama MLP, by its definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    intermediate_size = x.shape[-1] // 2
    gate = x[..., :intermediate_size].double()
    up = x[..., intermediate_size:].double()
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)
