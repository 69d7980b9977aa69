"""Normalisation, gated activation and looking up rows in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def embedding(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return functional.embedding(token_ids, weight).to(out_dtype)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def local_ids(token_ids: Tensor, first: int, count: int) -> Tensor:
    own = token_ids - first
    return own.masked_fill_((own < 0) | (own >= count), 0)


def clear_other_rows(x: Tensor, token_ids: Tensor, first: int, count: int) -> Tensor:
    is_elsewhere = (token_ids < first) | (token_ids >= first + count)
    return x.masked_fill_(is_elsewhere[:, None], 0.0)
