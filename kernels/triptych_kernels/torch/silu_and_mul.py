"""The gated activation of a Llama MLP in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
