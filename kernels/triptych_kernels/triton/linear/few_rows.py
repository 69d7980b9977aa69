"""Products of few rows with plain weights, bound by reading the weights: the decodes of one or a few streams.

They are computed transposed like `quantized_linear`, so that the rows, padded to 16, are the narrow side of the tensor
cores' tile, and asynchronous copies bring the next weights at the same time. A row's bits depend on the tiles, not on
the other rows. By default nothing is launched: a device's stored tiles (`tuning`) name the shapes for which these
kernels are faster than cuBLAS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.elementwise.silu_and_mul import activate_gated
from triptych_kernels.triton.linear.quantized_sum import store_tile, sum_splits
from triptych_kernels.triton.tuning.tunable import Tunable

FEW_ROWS = (1, 4, 16)
"""Numbers of rows that share a choice: up to each of these. Products of more rows are all cuBLAS's."""

_BLOCK_M = 16  # rows of a tile: what the tensor cores take at least
_BYTES_AHEAD = 32 << 10, 64 << 10
"""Bytes of weights in flight to one program. A multiprocessor of an H200 needs about 40 KiB, 4.8 TB/s for 1 us over 132
of them, and has one program or several."""
_NUM_SMS, MIN_SPLIT_INPUTS = 132, 512  # with fewer a split's sums are no longer small beside its weights
_MAX_SHARED_BYTES = 227 << 10
_SHAPES = (
    (16, 256, 1), (16, 256, 2), (16, 512, 2), (32, 128, 2), (32, 128, 4), (32, 256, 4),
    (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4),
)  # fmt: skip
"""(block_n, block_k, num_warps). Narrow ones make many programs; wide ones read rows from the L2 cache less often."""
_FLOAT32_SHAPES = (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4)  # no tensor cores: what registers hold


@dataclass(frozen=True, slots=True)
class ByTorch:
    """The choice of no tiles: the product is cuBLAS's."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one program."""

    block_n: int
    """Outputs; with an activation as many gates and as many ups."""
    block_k: int
    """Inputs of one step."""
    num_splits: int
    """Parts of the inputs, each summed by programs of its own."""
    num_warps: int
    num_stages: int


def linear_tiles(x: Tensor, weight: Tensor) -> Tiles | None:
    """Return the tiles to multiply with, or None if cuBLAS is faster."""
    return _tiles(LINEAR, x, weight)


def gated_linear_tiles(x: Tensor, weight: Tensor) -> Tiles | None:
    """Return the tiles to multiply and activate with, or None if cuBLAS is faster."""
    return _tiles(GATED_LINEAR, x, weight)


def multiply_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    tiles: Tiles,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute `ops.linear` or `ops.gated_linear`, summed in float32 and rounded once.

    Args:
        x: [num_rows, in_features], 1 to 16 rows, the last axis contiguous.
        weight: [out_features, in_features], contiguous.
        bias: [out_features].
        tiles: Tiles of the programs, of one split if `gated`.
        gated: Whether the weight's rows are gates and then ups.
    """
    num_rows, in_features = x.shape
    out_features = len(weight)
    num_outputs = out_features // 2 if gated else out_features
    split_inputs = triton.cdiv(triton.cdiv(in_features, tiles.num_splits), tiles.block_k) * tiles.block_k
    num_splits = triton.cdiv(in_features, split_inputs)
    is_whole = num_splits == 1
    assert is_whole or not gated, "gates and ups are multiplied before all of their parts are summed"
    out = torch.empty(
        (num_splits, num_rows, num_outputs), dtype=out_dtype if is_whole else torch.float32, device=x.device
    )
    _multiply_few_rows[(triton.cdiv(num_outputs, tiles.block_n), num_splits)](
        x, x.stride(0), weight, bias if is_whole else None, out, num_rows, num_outputs, in_features, split_inputs,
        ACTIVATION=activation if is_whole else None, IS_GATED=gated,
        BLOCK_N=tiles.block_n, BLOCK_M=_BLOCK_M, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out[0] if is_whole else sum_splits(out, bias, out_dtype, activation, gated=False)


def _tiles(tunable: Tunable[Tiles | ByTorch], x: Tensor, weight: Tensor) -> Tiles | None:
    num_rows = len(x)
    if not 0 < num_rows <= FEW_ROWS[-1] or not weight.is_contiguous():
        return None
    rows = FEW_ROWS[bisect_left(FEW_ROWS, num_rows)]
    choice = tunable.chosen(x.device, *weight.shape, weight.dtype, rows)
    return None if isinstance(choice, ByTorch) else choice


def _default(out_features: int, in_features: int, dtype: torch.dtype, rows: int) -> Tiles | ByTorch:
    return ByTorch()


def _linear_candidates(out_features: int, in_features: int, dtype: torch.dtype, rows: int) -> Iterator[Tiles]:
    """Yield tiles, with splits, which cost a second kernel, only if there are too few outputs to fill the device."""
    for tiles in _unsplit_candidates(dtype, weights_of_output=1):
        yield tiles
        wanted = triton.next_power_of_2(triton.cdiv(_NUM_SMS, triton.cdiv(out_features, tiles.block_n)))
        num_splits = min(wanted, in_features // MIN_SPLIT_INPUTS)
        if num_splits > 1:
            yield replace(tiles, num_splits=num_splits)


def _gated_candidates(out_features: int, in_features: int, dtype: torch.dtype, rows: int) -> Iterator[Tiles]:
    return _unsplit_candidates(dtype, weights_of_output=2)


def _unsplit_candidates(dtype: torch.dtype, weights_of_output: int) -> Iterator[Tiles]:
    shapes = _FLOAT32_SHAPES if dtype == torch.float32 else _SHAPES
    for (block_n, block_k, num_warps), bytes_ahead in product(shapes, _BYTES_AHEAD):
        input_bytes = block_k * dtype.itemsize  # of a row, or of one output's weights
        steps_ahead = bytes_ahead // (weights_of_output * block_n * input_bytes)
        shared_bytes = (steps_ahead + 1) * (weights_of_output * block_n + _BLOCK_M) * input_bytes
        if 2 <= steps_ahead <= 8 and shared_bytes <= _MAX_SHARED_BYTES:
            yield Tiles(block_n, block_k, 1, num_warps, steps_ahead + 1)


_KEY = ("out_features", "in_features", "dtype", "rows")
LINEAR: Tunable[Tiles | ByTorch] = Tunable(
    "linear_few_rows", _KEY, default=_default, candidates=_linear_candidates
)
GATED_LINEAR: Tunable[Tiles | ByTorch] = Tunable(
    "gated_linear_few_rows", _KEY, default=_default, candidates=_gated_candidates
)


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _multiply_few_rows(
    x, x_stride, weight, bias, out, num_rows, num_outputs, in_features, split_inputs,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inputs = tl.arange(0, BLOCK_K)
    split = tl.program_id(1)
    begin = split * split_inputs
    end = tl.minimum(begin + split_inputs, in_features)
    is_output = (outputs < num_outputs)[:, None]
    is_row = (rows < num_rows)[None, :]
    left = weight + outputs.to(tl.int64)[:, None] * in_features + inputs[None, :]
    right = x + rows.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    up_left = weight + (num_outputs + outputs).to(tl.int64)[:, None] * in_features + inputs[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        is_input = start + inputs < end
        is_weight = is_output & is_input[None, :]
        values = tl.load(right + start, mask=is_row & is_input[:, None], other=0.0)
        total = tl.dot(
            tl.load(left + start, mask=is_weight, other=0.0), values, total, input_precision="ieee"
        )
        if IS_GATED:
            up = tl.dot(
                tl.load(up_left + start, mask=is_weight, other=0.0), values, up, input_precision="ieee"
            )
    if IS_GATED:
        if bias is not None:
            total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)[:, None]
            up += tl.load(bias + num_outputs + outputs, mask=outputs < num_outputs, other=0.0)[:, None]
        values = activate_gated(total, up, ACTIVATION)
        store_tile(out, values, None, outputs, rows, split, num_rows, num_outputs)
    else:
        store_tile(out, total, bias, outputs, rows, split, num_rows, num_outputs, ACTIVATION)
