"""Normalisation, gated activation and looking up rows, one vector at a time."""

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


def silu_and_mul(x: Tensor) -> Tensor:
    intermediate_size = x.shape[-1] // 2
    gate = x[..., :intermediate_size].double()
    up = x[..., intermediate_size:].double()
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)


def embedding(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    rows = [weight[token] for token in token_ids.tolist()]
    return (torch.stack(rows) if rows else weight[:0]).to(out_dtype)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    gathered = [x[row] for row in rows.tolist()]
    return torch.stack(gathered) if gathered else x[:0]


def local_ids(token_ids: Tensor, first: int, count: int) -> Tensor:
    local = [token - first if first <= token < first + count else 0 for token in token_ids.tolist()]
    return torch.tensor(local, dtype=torch.int64)


def clear_other_rows(x: Tensor, token_ids: Tensor, first: int, count: int) -> Tensor:
    for row, token in enumerate(token_ids.tolist()):
        if not first <= token < first + count:
            x[row] = 0.0
    return x
