"""Root-mean-square normalisation with the residual addition, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LONGEST_WHOLE_ROW = 8192  # elements that a program holds in registers; longer rows are read twice
_ELEMENTS_PER_THREAD = (
    16  # two loads of 16 bytes in bfloat16 and four of the residual: enough to hide their latency
)
_MAX_WARPS = 16


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    hidden_size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    total = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        kernel = _norm_whole_rows if hidden_size <= _LONGEST_WHOLE_ROW else _norm_long_rows
        block = min(triton.next_power_of_2(hidden_size), _LONGEST_WHOLE_ROW)
        num_warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)
        kernel[(out.numel() // hidden_size,)](
            x, weight, residual, total, out, hidden_size, eps, BLOCK=block, num_warps=num_warps
        )
    return out if total is None else (out, total)


@triton.jit
def _norm_whole_rows(x, weight, residual, total, out, hidden_size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    weights = tl.load(weight + column, mask=inside, other=0.0).to(
        tl.float32
    )  # needs no sum, so it comes early
    summed = _add_residual(x, residual, total, row_start + column, inside)
    mean_square = tl.sum(summed * summed) / hidden_size
    tl.store(out + row_start + column, summed * tl.rsqrt(mean_square + eps) * weights, mask=inside)


@triton.jit
def _norm_long_rows(x, weight, residual, total, out, hidden_size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        inside = start + column < hidden_size
        summed = _add_residual(x, residual, total, row_start + start + column, inside)
        squares += summed * summed
    scale = tl.rsqrt(tl.sum(squares) / hidden_size + eps)
    for start in range(0, hidden_size, BLOCK):
        # x and the residual are added once more, as `total` might not be visible yet to threads that did not write it
        inside = start + column < hidden_size
        weights = tl.load(weight + start + column, mask=inside, other=0.0).to(tl.float32)
        summed = _add_residual(x, residual, None, row_start + start + column, inside)
        tl.store(out + row_start + start + column, summed * scale * weights, mask=inside)


@triton.jit
def _add_residual(x, residual, total, offsets, inside):
    """What is normalised, in float32: x, or its sum with the residual, stored in `total` where that is given."""
    summed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        summed += tl.load(residual + offsets, mask=inside, other=0.0)
        if total is not None:
            tl.store(total + offsets, summed, mask=inside)
    return summed
