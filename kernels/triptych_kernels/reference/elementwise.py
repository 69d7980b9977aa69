"""Normalisation, gated activation and looking up rows, one vector at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.reference.linear import activate


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else (x.double() + residual.double()).float()
    rows = []
    for vector in summed.double().reshape(-1, x.shape[-1]):
        mean_square = sum(value * value for value in vector.tolist()) / len(vector)
        rows.append(_scaled(vector / math.sqrt(mean_square + eps), weight, None))
    normalised = (torch.stack(rows) if rows else summed).reshape(x.shape).to(out_dtype)
    return normalised if residual is None else (normalised, summed)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else (x.double() + residual.double()).float()
    rows = []
    for vector in summed.double().reshape(-1, x.shape[-1]):
        distances = vector - sum(vector.tolist()) / len(vector)
        variance = sum(distance * distance for distance in distances.tolist()) / len(vector)
        rows.append(_scaled(distances / math.sqrt(variance + eps), weight, bias))
    normalised = (torch.stack(rows) if rows else summed).reshape(x.shape).to(out_dtype)
    return normalised if residual is None else (normalised, summed)


def _scaled(vector: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = vector if weight is None else vector * weight.double()
    return scaled if bias is None else scaled + bias.double()


def silu_and_mul(x: Tensor) -> Tensor:
    intermediate_size = x.shape[-1] // 2
    gate = x[..., :intermediate_size].double()
    up = x[..., intermediate_size:].double()
    return (activate(gate, "silu") * up).to(x.dtype)


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
