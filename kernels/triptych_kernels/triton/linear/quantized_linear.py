"""Products with weights of 4 or 8 bits in groups of 32 inputs.

The weights are the left operand of the tensor cores, which take that one from registers, where its integers are
unpacked. The rows are the right operand, which may be as narrow as 8. So the product is computed transposed.

There are two ways:

    integers   a group's integers, exact in the rows' dtype, are multiplied; its sum is scaled, in float32. The
               minimum is multiplied with the sum of the inputs (`group_sums`). Only the sums are rounded. For few
               rows, where unpacking costs more than scaling.
    weights    `scale * integer + minimum` is rounded to the rows' dtype, then multiplied. For many rows, where scaling
               each group's sums costs more.

A product by integers is cut into splits of the inputs that depend only on the weight's shape and the device. Each
split is summed in the same order for any number of rows; the programs of many rows take the splits one after the
other. Tiles may be measured ones with the same bits as the tiles below (`tuning.tunable.Tunable.same_bits`).
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
from triptych_kernels.triton.linear.group_sums import sum_input_groups
from triptych_kernels.triton.linear.quantized_sum import (
    outputs_of_block,
    store_activated,
    store_tile,
    sum_splits,
)
from triptych_kernels.triton.tuning.tunable import Tunable, row_bucket

WIDE_ROWS = 65
"""Fewest rows that are multiplied by weights if that is allowed. Reasoned, not measured: a tile this wide leaves no
registers for scaling the sums."""

MIN_SPLIT_GROUPS = 16  # 512 inputs: with fewer a split's sums are no longer small beside its weights
_PROGRAMS_PER_SM = 2  # of a product of few rows: 2 x 4 stages of 4 groups of 128 outputs, 80 KiB in flight


@dataclass(frozen=True, slots=True)
class _Tiles:
    block_n: int
    """Outputs."""
    block_m: int
    """Rows."""
    step: int
    """Groups of one step; even, as 4-bit groups are stored in pairs."""
    num_warps: int
    num_stages: int


def multiply_groups(
    x: Tensor,
    integers: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    *,
    gated: bool,
    batch_invariant: bool,
) -> Tensor:
    """Compute `ops.linear`, or `ops.gated_linear` if the outputs are gates and then ups.

    Args:
        x: [num_rows, in_features] float16, bfloat16 or float32, the last axis contiguous.
        integers: For 4 bits, [ceil(groups / 2), out_features, 8] int32, see `quantized_weight`; for 8 bits,
            [groups, out_features, 32] int8.
        scales: [groups, out_features] float16.
        minimums: [groups, out_features] float16; None means that 8 is subtracted from integers of 4 bits, and nothing
            from those of 8 bits.
        bias: [out_features] float32.
        batch_invariant: Whether rows are always multiplied by integers; if not, `WIDE_ROWS` and more are by weights.
    """
    num_rows = len(x)
    num_groups, out_features = scales.shape
    by_weights = not batch_invariant and num_rows >= WIDE_ROWS
    bits = 4 if integers.dtype == torch.int32 else 8
    if x.dtype == torch.float32:
        tiles = _FLOAT32
    else:
        tunable = BY_WEIGHTS if by_weights else BY_INTEGERS
        is_affine = minimums is not None
        tiles = tunable.chosen(x.device, out_features, 32 * num_groups, bits, is_affine, row_bucket(num_rows))
    num_tiles = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    split_groups = (
        _split(num_groups, tiles.step, num_sms(x.device) // (num_tiles[0] * num_tiles[1]))
        if by_weights
        else _invariant_split(num_groups, out_features, x.device)
    )
    num_splits = triton.cdiv(num_groups, split_groups)
    loops_splits = num_splits > 1 and num_tiles[0] > 1 and not by_weights
    num_parts = 1 if loops_splits else num_splits
    is_whole = num_parts == 1
    is_gated = gated and is_whole
    num_outputs, block_outputs = (n // 2 if is_gated else n for n in (out_features, tiles.block_n))
    out = torch.empty(
        (num_parts, num_rows, num_outputs), dtype=out_dtype if is_whole else torch.float32, device=x.device
    )
    x_sums = None if minimums is None or by_weights else sum_input_groups(x, tiles.block_m)
    if out.numel():
        _multiply_groups[(triton.cdiv(num_outputs, block_outputs), num_tiles[0], num_parts)](
            x, x.stride(0), x_sums, 0 if x_sums is None else x_sums.stride(0),
            integers, scales, minimums, bias if is_whole else None, out,
            num_rows, out_features, num_groups, split_groups,
            ACTIVATION=activation if is_whole else None, IS_GATED=is_gated,
            BITS=bits, BY_WEIGHTS=by_weights, LOOPS_SPLITS=loops_splits, STEP=tiles.step,
            BLOCK_N=tiles.block_n, BLOCK_M=tiles.block_m, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out[0] if is_whole else sum_splits(out, bias, out_dtype, activation, gated=gated)


# no tensor cores, so a tile is what registers hold of multiplications
_FLOAT32 = _Tiles(block_n=32, block_m=16, step=2, num_warps=4, num_stages=2)


def _default_by_integers(
    out_features: int, in_features: int, bits: int, is_affine: bool, rows: int
) -> _Tiles:
    if rows <= 16:
        return _Tiles(block_n=128, block_m=16, step=4, num_warps=4, num_stages=4)
    if rows <= 32:
        return _Tiles(block_n=128, block_m=32, step=4, num_warps=4, num_stages=3)
    return _Tiles(block_n=128, block_m=64, step=2, num_warps=8, num_stages=4)


def _candidates_by_integers(
    out_features: int, in_features: int, bits: int, is_affine: bool, rows: int
) -> Iterator[_Tiles]:
    """Yield small tiles, since their sums and the products of a group share the registers."""
    for block_n, block_m, step in product((64, 128), (16, 32, 64), (2, 4)):
        if not min(rows, 128) // 2 <= block_m <= rows:
            continue
        for num_warps, num_stages in product((4, 8) if block_n == 128 else (4,), (3, 4, 5)):
            if block_n * block_m // (32 * num_warps) <= 64:
                yield _Tiles(block_n, block_m, step, num_warps, num_stages)


def _default_by_weights(out_features: int, in_features: int, bits: int, is_affine: bool, rows: int) -> _Tiles:
    return _Tiles(block_n=128, block_m=128, step=2, num_warps=8, num_stages=4)


def _candidates_by_weights(
    out_features: int, in_features: int, bits: int, is_affine: bool, rows: int
) -> Iterator[_Tiles]:
    for block_n, block_m, num_warps, num_stages in product((64, 128), (64, 128, 256), (4, 8), (3, 4, 5)):
        if block_m <= rows and 32 <= block_n * block_m // (32 * num_warps) <= 128:
            yield _Tiles(block_n, block_m, 2, num_warps, num_stages)


_KEY = ("out_features", "in_features", "bits", "is_affine", "rows")
BY_INTEGERS = Tunable(
    "quantized_linear",
    _KEY,
    default=_default_by_integers,
    candidates=_candidates_by_integers,
    same_bits=True,
)
BY_WEIGHTS = Tunable(
    "quantized_linear_by_weights",
    _KEY,
    default=_default_by_weights,
    candidates=_candidates_by_weights,
)


def _invariant_split(num_groups: int, out_features: int, device: torch.device) -> int:
    """Return the groups of a split with which few rows fill the device; it is the same for any number of rows."""
    return _split(num_groups, 4, _PROGRAMS_PER_SM * num_sms(device) // triton.cdiv(out_features, 128))


def _split(num_groups: int, step: int, wanted: int) -> int:
    """Return the number of groups of each of about `wanted` splits, a multiple of `step`."""
    num_splits = max(min(wanted, num_groups // MIN_SPLIT_GROUPS), 1)
    return triton.cdiv(triton.cdiv(num_groups, num_splits), step) * step


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _multiply_groups(
    x, x_stride, x_sums, x_sums_stride, integers, scales, minimums, bias, out,
    num_rows, out_features, num_groups, split_groups,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    BITS: tl.constexpr, BY_WEIGHTS: tl.constexpr, LOOPS_SPLITS: tl.constexpr,
    STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    outputs = outputs_of_block(block, out_features, IS_GATED, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    if LOOPS_SPLITS:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, num_groups, split_groups):
            total += sum_groups(
                x, x_stride, x_sums, x_sums_stride, integers, scales, minimums, outputs, rows,
                first, tl.minimum(first + split_groups, num_groups), num_rows, out_features,
                BITS, BY_WEIGHTS, STEP, BLOCK_N, BLOCK_M,
            )  # fmt: skip
    else:
        first = split * split_groups
        total = sum_groups(
            x, x_stride, x_sums, x_sums_stride, integers, scales, minimums, outputs, rows,
            first, tl.minimum(first + split_groups, num_groups), num_rows, out_features,
            BITS, BY_WEIGHTS, STEP, BLOCK_N, BLOCK_M,
        )  # fmt: skip
    if IS_GATED:
        store_activated(
            out, total, bias, block, outputs, rows, num_rows, out_features, ACTIVATION, BLOCK_N, BLOCK_M
        )
    else:
        store_tile(out, total, bias, outputs, rows, split, num_rows, out_features, ACTIVATION)


@triton.jit
def sum_groups(
    x, x_stride, x_sums, x_sums_stride, integers, scales, minimums, outputs, rows,
    begin, end, num_rows, out_features,
    BITS: tl.constexpr, BY_WEIGHTS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the product over the groups from `begin` to `end`, [outputs, rows] float32.

    Args:
        x_sums: Result of `sum_input_groups`, if there are minimums and weights are not rounded.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    UNIT: tl.constexpr = 2 if BITS == 4 else 1  # groups of a unit of the storage
    ELEMENTS: tl.constexpr = 8 if BITS == 4 else 32  # of one output therein
    LANES: tl.constexpr = 16 if BITS == 4 else 32  # inputs multiplied at once
    element = tl.arange(0, ELEMENTS)
    lane = tl.arange(0, LANES)
    is_output = outputs < out_features
    is_row = (rows < num_rows)[None, :]
    inputs = x + rows.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, STEP):
        for i in tl.static_range(STEP // UNIT):
            unit = start // UNIT + i
            places = unit.to(tl.int64) * out_features + outputs
            words = tl.load(
                integers + places[:, None] * ELEMENTS + element[None, :],
                mask=(is_output & (unit * UNIT < end))[:, None],
                other=0,
            )
            for half in tl.static_range(UNIT):
                group = unit * UNIT + half
                is_weight = is_output & (group < end)
                place = group.to(tl.int64) * out_features + outputs
                scale = tl.load(scales + place, mask=is_weight, other=0.0).to(tl.float32)[:, None]
                if minimums is not None:
                    minimum = tl.load(minimums + place, mask=is_weight, other=0.0).to(tl.float32)[:, None]
                products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for part in tl.static_range(UNIT):
                    x_part = tl.load(
                        inputs + (group * 32 + part * 16), mask=is_row & (group < end), other=0.0
                    )
                    if BITS == 4:
                        weights = _whole_numbers(words >> (8 * half + 4 * part), minimums is None, dtype)
                    else:
                        weights = words.to(dtype)
                    if BY_WEIGHTS:
                        weights = weights.to(tl.float32) * scale
                        if minimums is not None:
                            weights += minimum
                        acc = tl.dot(weights.to(dtype), x_part, acc, input_precision="ieee")
                    else:
                        products = tl.dot(weights, x_part, products, input_precision="ieee")
                if not BY_WEIGHTS:
                    acc += products * scale
                    if minimums is not None:
                        sums = tl.load(x_sums + group.to(tl.int64) * x_sums_stride + rows)
                        acc += sums[None, :] * minimum
    return acc


@triton.jit
def _whole_numbers(pairs, IS_SYMMETRIC: tl.constexpr, dtype: tl.constexpr):
    """Return the lowest four bits of both halves of int32 words [n, k] as numbers [n, 2 * k], minus 8 if symmetric.

    In 16 bits they become the lowest bits of a mantissa, two at once, since conversions are slow: 0x4300 is 128 in
    bfloat16, with 7 bits of mantissa, and 0x6400 is 1024 in float16, with 10.
    """
    ZERO: tl.constexpr = 8 if IS_SYMMETRIC else 0
    pairs &= 0x000F000F
    if dtype == tl.bfloat16:
        return _halves(pairs | 0x43004300).to(tl.bfloat16, bitcast=True) - (128.0 + ZERO)
    elif dtype == tl.float16:
        return _halves(pairs | 0x64006400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)
    else:
        return _halves(pairs).to(tl.float32) - ZERO


@triton.jit
def _halves(words):
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).reshape(words.shape[0], words.shape[1] * 2)
