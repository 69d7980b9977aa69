"""Normalisation and looking up rows by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.weights.packed import PackedWeight


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    out, total = _new_results(x, residual, out_dtype)
    launch("rms_norm", x, **_norm_operands(x, weight, eps, residual, out, total))
    return out if total is None else (out, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | tuple[Tensor, Tensor]:
    out, total = _new_results(x, residual, out_dtype)
    operands = _norm_operands(x, weight, eps, residual, out, total)
    launch("layer_norm", x, **{f"norm_{field}": operand for field, operand in operands.items()}, bias=bias)
    return out if total is None else (out, total)


def _new_results(x: Tensor, residual: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return memory for the normalised tensor, and for the sum if there is a residual."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    return out, None if residual is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _norm_operands(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Tensor, total: Tensor | None
) -> dict[str, Operand]:
    """Return the fields of `Norm` in norm.cpp."""
    return {
        "x_dtype": DTYPES[x.dtype],
        "weight_dtype": DTYPES[torch.float32 if weight is None else weight.dtype],
        "out_dtype": DTYPES[out.dtype],
        "residual_dtype": DTYPES[torch.float32],
        "x": x,
        "x_stride": x.stride(0),
        "weight": weight,
        "residual": residual,
        "sum": total,
        "out": out,
        "vectors": x.shape[1:-1].numel(),
        "size": x.shape[-1],
        "eps": eps,
    }


def embedding(token_ids: Tensor, weight: Tensor | PackedWeight, out_dtype: torch.dtype) -> Tensor:
    if isinstance(weight, PackedWeight):
        return weight.rows(token_ids, out_dtype)
    out = torch.empty(len(token_ids), weight.shape[1], dtype=out_dtype, device=token_ids.device)
    launch(
        "embedding", token_ids, dtype=DTYPES[weight.dtype], out_dtype=DTYPES[out_dtype], is_packed=False,
        weight=weight, token_ids=token_ids, out=out, size=weight.shape[1],
    )  # fmt: skip
    return out


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(len(rows), x.shape[1], dtype=x.dtype, device=x.device)
    launch("gather_rows", rows, x=x, rows=rows, out=out, row_bytes=x.shape[1] * x.itemsize)
    return out


def local_ids(token_ids: Tensor, first: int, count: int) -> Tensor:
    out = torch.empty(token_ids.shape, dtype=torch.int64, device=token_ids.device)
    launch("local_ids", token_ids, ids=token_ids, out=out, first=first, count=count)
    return out


def clear_other_rows(x: Tensor, token_ids: Tensor, first: int, count: int) -> Tensor:
    row_bytes = x.shape[1] * x.itemsize
    launch("clear_other_rows", x, ids=token_ids, x=x, first=first, count=count, row_bytes=row_bytes)
    return x
