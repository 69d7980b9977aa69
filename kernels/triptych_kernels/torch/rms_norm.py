"""Root-mean-square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return torch.rms_norm(x, weight.shape, weight, eps)
    residual = x + residual
    return torch.rms_norm(residual, weight.shape, weight.float(), eps).to(x.dtype), residual
