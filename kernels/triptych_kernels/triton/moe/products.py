"""The two products of a mixture of experts over the tiles of `routing`, and the sum over a token's experts."""

from __future__ import annotations

import triton
import triton.language as tl

from triptych_kernels.triton.moe.tiles import place_of_program

SUM_BLOCK = 1024  # elements of a token that one program adds up


@triton.jit(do_not_specialize=["max_tiles"])  # it changes from step to step
def gate_up_product(
    x, x_stride, w13, activated, pairs, tile_experts, tile_rows, max_tiles, hidden_size, intermediate_size,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N columns of silu(gate) * up of one tile to the rows `tile * BLOCK_M + i` of `activated`."""
    tile, column_block = place_of_program(max_tiles, tl.cdiv(intermediate_size, BLOCK_N), GROUP)
    num_rows = tl.load(tile_rows + tile)
    if num_rows > 0:
        row = tl.arange(0, BLOCK_M)
        # rows beyond the tile's read token 0 and are dropped at the end: cheaper than masks in the loop
        pair = tl.load(pairs + tile * BLOCK_M + row, mask=row < num_rows, other=0)
        inputs = x + (pair // TOP_K).to(tl.int64) * x_stride
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        expert = tl.load(tile_experts + tile).to(tl.int64)
        gate_rows = w13 + (expert * 2 * intermediate_size + columns) * hidden_size
        up_rows = w13 + (expert * 2 * intermediate_size + intermediate_size + columns) * hidden_size
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, hidden_size, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            is_column = columns < intermediate_size
            input_tile = _load_rows(inputs, row < BLOCK_M, inner, hidden_size, EVEN)
            gate_tile = _load_rows(gate_rows, is_column, inner, hidden_size, EVEN)
            up_tile = _load_rows(up_rows, is_column, inner, hidden_size, EVEN)
            gate = tl.dot(input_tile, gate_tile.T, gate, input_precision="ieee")
            up = tl.dot(input_tile, up_tile.T, up, input_precision="ieee")
        out = activated + (tile * BLOCK_M + row).to(tl.int64)[:, None] * intermediate_size + columns[None, :]
        inside = (row < num_rows)[:, None] & (columns < intermediate_size)[None, :]
        tl.store(out, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit(do_not_specialize=["max_tiles"])  # it changes from step to step
def down_product(
    activated, w2, probabilities, weighted, pairs, tile_experts, tile_rows, max_tiles, hidden_size,
    intermediate_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N columns of the results of one tile, times their probabilities, to the rows `pair` of `weighted`."""
    tile, column_block = place_of_program(max_tiles, tl.cdiv(hidden_size, BLOCK_N), GROUP)
    num_rows = tl.load(tile_rows + tile)
    if num_rows > 0:
        row = tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tile * BLOCK_M + row, mask=row < num_rows, other=0)
        inputs = activated + (tile * BLOCK_M + row).to(tl.int64) * intermediate_size
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        expert = tl.load(tile_experts + tile).to(tl.int64)
        weight_rows = w2 + (expert * hidden_size + columns) * intermediate_size
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, intermediate_size, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            # rows beyond the tile's hold anything, and come to nothing but themselves
            input_tile = _load_rows(inputs, row < BLOCK_M, inner, intermediate_size, EVEN)
            weight_tile = _load_rows(weight_rows, columns < hidden_size, inner, intermediate_size, EVEN)
            result = tl.dot(input_tile, weight_tile.T, result, input_precision="ieee")
        result *= tl.load(probabilities + pair)[:, None]
        out = weighted + pair.to(tl.int64)[:, None] * hidden_size + columns[None, :]
        tl.store(out, result, mask=(row < num_rows)[:, None] & (columns < hidden_size)[None, :])


@triton.jit
def sum_pairs(weighted, out, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add the results of a token's experts, always in the order of its choice."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden_size
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        total += tl.load(weighted + (token * TOP_K + rank) * hidden_size + column, mask=inside, other=0.0)
    tl.store(out + token * hidden_size + column, total, mask=inside)


@triton.jit
def _load_rows(rows, is_row, inner, size, EVEN: tl.constexpr):
    """Load [rows, inner] of a matrix, without a mask if EVEN says that blocks divide both its axes."""
    if EVEN:
        return tl.load(rows[:, None] + inner[None, :])
    else:
        return tl.load(
            rows[:, None] + inner[None, :], mask=is_row[:, None] & (inner < size)[None, :], other=0.0
        )
