"""Root-mean-square normalisation, vector by vector in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else (x.double() + residual.double()).float()
    vectors = summed.double().reshape(-1, x.shape[-1])
    rows = []
    for vector in vectors:
        mean_square = sum(value * value for value in vector.tolist()) / len(vector)
        rows.append(vector / math.sqrt(mean_square + eps) * weight.double())
    normalised = (torch.stack(rows) if rows else vectors).reshape(x.shape).to(x.dtype)
    return normalised if residual is None else (normalised, summed)
