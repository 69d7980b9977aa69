"""Root-mean-square normalisation with the residual addition: a program takes a row, or some short vectors of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_WHOLE_ROW = 8192  # elements that a program holds in registers; longer rows are read twice
_ELEMENTS_PER_THREAD = (
    16  # two loads of 16 bytes in bfloat16 and four of the residual: enough to hide their latency
)
_MAX_WARPS = 16
_HEADS_AT_ONCE = (
    1024  # elements of a row's vectors that a program of two warps takes: 32 bytes per thread in bfloat16
)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    hidden_size = x.shape[-1]
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.ndim > 2 and residual is None and hidden_size <= _HEADS_AT_ONCE:
        _norm_each_head(x, weight, eps, out)
        return out
    x = x.contiguous()
    total = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        kernel = _norm_whole_rows if hidden_size <= LONGEST_WHOLE_ROW else _norm_long_rows
        block, num_warps = program_of_row(hidden_size)
        kernel[(out.numel() // hidden_size,)](
            x, weight, residual, total, out, hidden_size, eps, BLOCK=block, num_warps=num_warps
        )
    return out if total is None else (out, total)


def program_of_row(size: int) -> tuple[int, int]:
    """Return the elements that a program takes at a time, and its warps."""
    block = min(triton.next_power_of_2(size), LONGEST_WHOLE_ROW)
    return block, min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)


def _norm_each_head(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    num_heads, head_dim = x.shape[1:-1].numel(), x.shape[-1]
    if out.numel():
        block = triton.next_power_of_2(head_dim)
        heads_block = min(_HEADS_AT_ONCE // block, triton.next_power_of_2(num_heads))
        _norm_heads[(len(x), triton.cdiv(num_heads, heads_block))](
            x, x.stride(0), weight, out, num_heads, head_dim, eps,
            BLOCK_H=heads_block, BLOCK=block, num_warps=max(heads_block * block // 512, 1),
        )  # fmt: skip


@triton.jit
def _norm_whole_rows(x, weight, residual, total, out, hidden_size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    weights = load_weights(weight, column, inside)  # needs no sum, so it comes early
    summed = add_residual(x, residual, total, row_start + column, inside)
    mean_square = tl.sum(summed * summed) / hidden_size
    tl.store(out + row_start + column, summed * tl.rsqrt(mean_square + eps) * weights, mask=inside)


@triton.jit
def _norm_long_rows(x, weight, residual, total, out, hidden_size, eps, BLOCK: tl.constexpr):
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        inside = start + column < hidden_size
        summed = add_residual(x, residual, total, row_start + start + column, inside)
        squares += summed * summed
    scale = tl.rsqrt(tl.sum(squares) / hidden_size + eps)
    for start in range(0, hidden_size, BLOCK):
        # x and the residual are added once more, as `total` might not be visible yet to threads that did not write it
        inside = start + column < hidden_size
        weights = load_weights(weight, start + column, inside)
        summed = add_residual(x, residual, None, row_start + start + column, inside)
        tl.store(out + row_start + start + column, summed * scale * weights, mask=inside)


@triton.jit
def _norm_heads(
    x, x_stride, weight, out, num_heads, head_dim, eps, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise BLOCK_H neighbouring vectors of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (dim < head_dim)
    weights = load_weights(weight, dim, dim < head_dim)
    vectors = tl.load(x + row * x_stride + head * head_dim + dim, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(vectors * vectors, 1) / head_dim + eps)
    tl.store(out + (row * num_heads + head) * head_dim + dim, vectors * scale[:, None] * weights, mask=inside)


@triton.jit
def load_weights(weight, offsets, inside):
    """Return elements of the weight in float32, or 1 without one."""
    if weight is not None:
        weights = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        weights = 1.0
    return weights


@triton.jit
def add_residual(x, residual, total, offsets, inside):
    """Return x, or its sum with the residual, in float32, and store it in `total` if that is given."""
    summed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        summed += tl.load(residual + offsets, mask=inside, other=0.0)
        if total is not None:
            tl.store(total + offsets, summed, mask=inside)
    return summed
