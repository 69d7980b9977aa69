"""The end of products that are computed transposed: storing their tiles, and the sum over splits of the inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.elementwise.silu_and_mul import activate, activate_gated

_BLOCK = 512  # outputs of one program: its 128 threads load 16 bytes of each split in float32


def sum_splits(
    partials: Tensor, bias: Tensor | None, out_dtype: torch.dtype, activation: str | None, *, gated: bool
) -> Tensor:
    """Sum the parts of a product in the order of its inputs, add the bias, activate, round once.

    Args:
        partials: [splits, num_rows, out_features] float32.
        bias: [out_features].
        activation: As `ops.linear` takes it, or `ops.gated_linear`.
        gated: Whether the outputs are gates and then ups.
    Returns:
        [num_rows, out_features], half as many if gated.
    """
    num_splits, num_rows, out_features = partials.shape
    num_outputs = out_features // 2 if gated else out_features
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=partials.device)
    _sum_splits[(num_rows, triton.cdiv(num_outputs, _BLOCK))](
        partials, num_splits, bias, out, num_outputs, out_features,
        ACTIVATION=activation, IS_GATED=gated, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _sum_splits(
    partials, num_splits, bias, out, num_outputs, out_features,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    first = partials + row * out_features + column
    split_stride = tl.num_programs(0).to(tl.int64) * out_features
    total = _sum_columns(first, num_splits, split_stride, bias, column, inside, BLOCK)
    if IS_GATED:
        up = _sum_columns(
            first + num_outputs, num_splits, split_stride, bias, column + num_outputs, inside, BLOCK
        )
        total = activate_gated(total, up, ACTIVATION)
    elif ACTIVATION is not None:
        total = activate(total, ACTIVATION)
    tl.store(out + row * num_outputs + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_columns(first, num_splits, split_stride, bias, column, inside, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        total += tl.load(first + split * split_stride, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0)
    return total


@triton.jit
def outputs_of_block(block, out_features, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number the outputs of a tile, [BLOCK_N]; if gated, gates and then the ups of the same columns.

    A tile that extends beyond the last gate takes ups as gates; `store_activated` leaves them out.
    """
    place = tl.arange(0, BLOCK_N)
    if IS_GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        outputs = block * HALF + place % HALF + place // HALF * (out_features // 2)
    else:
        outputs = block * BLOCK_N + place
    return outputs


@triton.jit
def store_activated(
    out, tile, bias, block, outputs, rows, num_rows, out_features,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the gated activation of a tile [outputs, rows] that is summed over all inputs.

    The arithmetic is that of `_sum_splits`, which few rows go through.

    Args:
        out: [num_rows, out_features / 2].
        block: Number of the tile's block, as `outputs_of_block` takes it.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    if bias is not None:
        tile += tl.load(bias + outputs, mask=outputs < out_features, other=0.0)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(tile, [2, HALF, BLOCK_M]), [1, 2, 0]))
    columns = block * HALF + tl.arange(0, HALF)
    values = activate_gated(gate, up, ACTIVATION)
    store_tile(out, values, None, columns, rows, 0, num_rows, out_features // 2)


@triton.jit
def store_tile(
    out, tile, bias, outputs, rows, split, num_rows, out_features, ACTIVATION: tl.constexpr = None
):
    """Store a tile [outputs, rows] of split `split` of a product [splits, num_rows, out_features].

    Args:
        bias: Added if this is the whole product and not a part of it, and so is the activation.
    """
    if bias is not None:
        tile += tl.load(bias + outputs, mask=outputs < out_features, other=0.0)[:, None]
    if ACTIVATION is not None:
        tile = activate(tile, ACTIVATION)
    first = (split * num_rows + rows).to(tl.int64) * out_features
    inside = (rows < num_rows)[:, None] & (outputs < out_features)[None, :]
    values = tl.trans(tile).to(out.dtype.element_ty)
    tl.store(out + first[:, None] + outputs[None, :], values, mask=inside)
