"""Layer normalisation with the residual addition: a program takes a vector."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.elementwise.rms_norm import (
    LONGEST_WHOLE_ROW,
    add_residual,
    load_weights,
    program_of_row,
)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | tuple[Tensor, Tensor]:
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    x = x.contiguous()
    total = None
    if residual is not None:
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        kernel = _norm_whole_rows if size <= LONGEST_WHOLE_ROW else _norm_long_rows
        block, num_warps = program_of_row(size)
        kernel[(out.numel() // size,)](
            x, weight, bias, residual, total, out, size, eps, BLOCK=block, num_warps=num_warps
        )
    return out if total is None else (out, total)


@triton.jit
def _norm_whole_rows(x, weight, bias, residual, total, out, size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    weights = load_weights(weight, column, inside)  # needs no sum, so it comes early
    summed = add_residual(x, residual, total, row_start + column, inside)
    distances = tl.where(inside, summed - tl.sum(summed) / size, 0.0)
    values = distances * tl.rsqrt(tl.sum(distances * distances) / size + eps) * weights
    tl.store(out + row_start + column, _add_bias(values, bias, column, inside), mask=inside)


@triton.jit
def _norm_long_rows(x, weight, bias, residual, total, out, size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + column < size
        sums += add_residual(x, residual, total, row_start + start + column, inside)
    mean = tl.sum(sums) / size
    # x and the residual are added anew, as `total` might not be visible yet to threads that did not write it
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + column < size
        summed = add_residual(x, residual, None, row_start + start + column, inside)
        distances = tl.where(inside, summed - mean, 0.0)
        squares += distances * distances
    scale = tl.rsqrt(tl.sum(squares) / size + eps)
    for start in range(0, size, BLOCK):
        inside = start + column < size
        summed = add_residual(x, residual, None, row_start + start + column, inside)
        values = (summed - mean) * scale * load_weights(weight, start + column, inside)
        tl.store(
            out + row_start + start + column, _add_bias(values, bias, start + column, inside), mask=inside
        )


@triton.jit
def _add_bias(values, bias, offsets, inside):
    if bias is not None:
        values += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
    return values
