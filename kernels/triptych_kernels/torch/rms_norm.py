"""Root-mean-square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return _norm(x, weight, eps)
    residual = x + residual
    return _norm(residual, weight, eps), residual


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x, weight.shape, weight.float(), eps).to(weight.dtype)
