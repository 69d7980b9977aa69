"""Sums of the inputs of a product by groups of 32, which are multiplied with the minimums of quantized weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.weights.formats import GROUP_SIZE

_ROWS = 16  # of one program: 64 bytes of each group's sums
_GROUPS = 8  # of one program: with the rows 8 KiB of inputs in 16 bits, 32 bytes a thread


def sum_input_groups(x: Tensor, block_m: int) -> Tensor:
    """Sum each row's groups in float32, once for all programs of a product.

    Args:
        x: [num_rows, in_features], the last axis contiguous, in_features a multiple of 32.
        block_m: Rows of the product's tiles, at least 16.
    Returns:
        [groups, rows] float32, padded with zeros, so that a product reads whole tiles and steps: groups up to a
        multiple of 8, and rows to the next multiple of block_m after num_rows.
    """
    num_rows, in_features = x.shape
    num_groups = triton.cdiv(in_features // GROUP_SIZE, _GROUPS) * _GROUPS
    padded_rows = (num_rows // block_m + 1) * block_m if num_rows else 0
    sums = torch.empty((num_groups, padded_rows), dtype=torch.float32, device=x.device)
    if sums.numel():
        _sum_groups[(triton.cdiv(padded_rows, _ROWS), num_groups // _GROUPS)](
            x,
            x.stride(0),
            sums,
            sums.stride(0),
            num_rows,
            in_features,
            ROWS=_ROWS,
            GROUPS=_GROUPS,
            num_warps=4,
        )
    return sums


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _sum_groups(
    x, x_stride, sums, sums_stride, num_rows, in_features, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = tl.program_id(1) * (GROUPS * 32) + tl.arange(0, GROUPS * 32)
    values = tl.load(
        x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :],
        mask=(rows < num_rows)[:, None] & (inputs < in_features)[None, :],
        other=0.0,
    )
    totals = tl.sum(tl.reshape(values.to(tl.float32), [ROWS, GROUPS, 32]), 2)
    tl.store(sums + groups.to(tl.int64)[:, None] * sums_stride + rows[None, :], tl.trans(totals))
