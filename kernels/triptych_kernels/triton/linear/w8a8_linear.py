"""Products of rows and weights that are both in 8 bits, with a scale per row and one per output.

They are computed transposed like `quantized_linear`, in splits of the inputs that depend only on the weight's shape
and the device. Each split is scaled, then they are added in order, so a row has the same bits in any batch. Tiles may
be measured ones with the same bits as the tiles below (`tuning.tunable.Tunable.same_bits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.attention.plan import num_sms
from triptych_kernels.triton.linear.quantized_sum import (
    outputs_of_block,
    store_activated,
    store_tile,
    sum_splits,
)
from triptych_kernels.triton.tuning.tunable import Tunable, row_bucket

BLOCK_K = 128
"""Inputs of one step: as many as tensor cores may add in the fewer bits of their float8 sums before float32."""

MIN_SPLIT_INPUTS = 512  # with fewer a split's sums are no longer small beside its weights
_SPLIT_OUTPUTS = 128
"""Outputs of one program for which the number of splits is computed."""
_PROGRAMS_PER_SM = 2  # of a product of few rows: 2 x 4 stages of 128 outputs of 128 inputs, 128 KiB in flight


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one program. The defaults fit the 99 KiB of shared memory of a program on Ada, the first with float8."""

    block_n: int
    """Outputs."""
    block_m: int
    """Rows."""
    num_warps: int
    num_stages: int


def multiply_bytes(
    x: Tensor,
    x_scales: Tensor,
    elements: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    *,
    gated: bool,
) -> Tensor:
    """Compute `ops.linear` of `x_scales * x` and `scales * elements`, or `ops.gated_linear` if `gated`.

    Args:
        x: [num_rows, in_features] int8 or float8_e4m3fn, contiguous.
        x_scales: [num_rows] float32.
        elements: [out_features, in_features] of the dtype of x, contiguous.
        scales: [out_features] float32.
        bias: [out_features] float32.
    """
    num_rows, in_features = x.shape
    out_features = len(elements)
    tiles = TILES.chosen(x.device, out_features, in_features, x.dtype, row_bucket(num_rows))
    num_tiles = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    # for any tiles: they may differ from one number of rows to another, splits may not
    wanted = _PROGRAMS_PER_SM * num_sms(x.device) // triton.cdiv(out_features, _SPLIT_OUTPUTS)
    num_splits = max(min(wanted, in_features // MIN_SPLIT_INPUTS), 1)
    split_inputs = triton.cdiv(triton.cdiv(in_features, num_splits), BLOCK_K) * BLOCK_K
    num_splits = triton.cdiv(in_features, split_inputs)
    loops_splits = num_splits > 1 and num_tiles[0] > 1
    num_parts = 1 if loops_splits else num_splits
    is_whole = num_parts == 1
    is_gated = gated and is_whole
    num_outputs, block_outputs = (n // 2 if is_gated else n for n in (out_features, tiles.block_n))
    out = torch.empty(
        (num_parts, num_rows, num_outputs), dtype=out_dtype if is_whole else torch.float32, device=x.device
    )
    if out.numel():
        _multiply_bytes[(triton.cdiv(num_outputs, block_outputs), num_tiles[0], num_parts)](
            x, x_scales, elements, scales, bias if is_whole else None, out,
            num_rows, out_features, in_features, split_inputs,
            ACTIVATION=activation if is_whole else None, IS_GATED=is_gated, LOOPS_SPLITS=loops_splits,
            BLOCK_N=tiles.block_n, BLOCK_M=tiles.block_m, BLOCK_K=BLOCK_K,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            # a split's sum is scaled, rounded and then added, whether a program takes one split or all
            enable_fp_fusion=False,
        )  # fmt: skip
    return out[0] if is_whole else sum_splits(out, bias, out_dtype, activation, gated=gated)


def _default_tiles(out_features: int, in_features: int, element_dtype: torch.dtype, rows: int) -> _Tiles:
    if rows <= 16:
        return _Tiles(block_n=128, block_m=16, num_warps=4, num_stages=4)
    if rows <= 64:
        return _Tiles(block_n=128, block_m=64, num_warps=4, num_stages=4)
    return _Tiles(block_n=128, block_m=128, num_warps=8, num_stages=3)


def _candidates(
    out_features: int, in_features: int, element_dtype: torch.dtype, rows: int
) -> Iterator[_Tiles]:
    """Yield tiles with sums that fit the registers, with enough bytes in flight and at most 227 KiB."""
    for block_n, block_m, num_warps in product((64, 128, 256), (16, 32, 64, 128, 256), (4, 8)):
        sums = block_n * block_m // (32 * num_warps)  # of a thread
        if not min(rows, 256) // 4 <= block_m <= rows or not min(rows, 64) // 4 <= sums <= 128:
            continue
        for num_stages in (3, 4, 6):
            if 48 << 10 <= num_stages * (block_n + block_m) * BLOCK_K <= 227 << 10:
                yield _Tiles(block_n, block_m, num_warps, num_stages)


TILES = Tunable(
    "w8a8_linear",
    ("out_features", "in_features", "element_dtype", "rows"),
    default=_default_tiles,
    candidates=_candidates,
    same_bits=True,
)


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _multiply_bytes(
    x, x_scales, elements, scales, bias, out, num_rows, out_features, in_features, split_inputs,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, LOOPS_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    outputs = outputs_of_block(block, out_features, IS_GATED, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    row_scale = tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)[None, :]
    output_scale = tl.load(scales + outputs, mask=outputs < out_features, other=0.0)[:, None]
    if LOOPS_SPLITS:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, in_features, split_inputs):
            part = dot_bytes(
                x, elements, outputs, rows, first, tl.minimum(first + split_inputs, in_features),
                num_rows, out_features, in_features, BLOCK_N, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            total += part * output_scale * row_scale
    else:
        first = split * split_inputs
        part = dot_bytes(
            x, elements, outputs, rows, first, tl.minimum(first + split_inputs, in_features),
            num_rows, out_features, in_features, BLOCK_N, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        total = part * output_scale * row_scale
    if IS_GATED:
        store_activated(
            out, total, bias, block, outputs, rows, num_rows, out_features, ACTIVATION, BLOCK_N, BLOCK_M
        )
    else:
        store_tile(out, total, bias, outputs, rows, split, num_rows, out_features, ACTIVATION)


@triton.jit
def dot_bytes(
    x, elements, outputs, rows, begin, end, num_rows, out_features, in_features,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the product of the elements of the inputs from `begin` to `end`, [outputs, rows] float32."""
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    inputs = tl.arange(0, BLOCK_K)
    left = elements + outputs.to(tl.int64)[:, None] * in_features + inputs[None, :]
    right = x + rows.to(tl.int64)[None, :] * in_features + inputs[:, None]
    is_output = (outputs < out_features)[:, None]
    is_row = (rows < num_rows)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for start in range(begin, end, BLOCK_K):
        is_input = start + inputs < end
        weights = tl.load(left + start, mask=is_output & is_input[None, :], other=0.0)
        values = tl.load(right + start, mask=is_row & is_input[:, None], other=0.0)
        acc = tl.dot(weights, values, acc, max_num_imprecise_acc=BLOCK_K, out_dtype=SUM)
    return acc.to(tl.float32)
