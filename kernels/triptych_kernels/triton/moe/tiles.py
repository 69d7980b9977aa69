"""The walk of a mixture's products over the tiles of `routing`, and the storing of their results.

With quantized weights a tile is computed transposed, [columns, rows], and the result of the first product has a row
per pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych_kernels.triton.elementwise.silu_and_mul import activate
from triptych_kernels.triton.linear.quantized_sum import store_tile

TILES_IN_GROUP = 16
"""Tiles that pass over all columns together; 16 of 128 rows of 4,096 elements in bfloat16 are 16 MB, a third of an
H200's L2 cache."""


@triton.jit
def place_of_program(num_tiles, num_column_blocks, GROUP: tl.constexpr):
    """Return this program's tile and block of columns.

    GROUP tiles pass over all columns together, so that a weight is read once from memory for all of them, and their
    inputs stay in the L2 cache.
    """
    program = tl.program_id(0)
    first = program // (GROUP * num_column_blocks) * GROUP
    group = tl.minimum(num_tiles - first, GROUP)
    within = program - first * num_column_blocks
    return first + within % group, within // group


@triton.jit
def part_of_program(
    pairs, tile_experts, tile_rows, num_tiles, num_pairs, num_columns,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the number of rows of this program's tile, its expert, the pairs of its rows, and this program's columns.

    A row beyond those of the tile has pair `num_pairs`, which must not be read or written. For a tile without rows
    nothing else is defined.
    """
    tile, column_block = place_of_program(num_tiles, tl.cdiv(num_columns, BLOCK_N), GROUP)
    num_rows = tl.load(tile_rows + tile)
    row = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs + tile * BLOCK_M + row, mask=row < num_rows, other=num_pairs)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    return num_rows, tl.load(tile_experts + tile).to(tl.int64), pair, columns


@triton.jit
def store_gated(activated, gate, up, columns, pair, num_pairs, intermediate_size):
    """Store `silu(gate) * up`, [columns, rows], to the rows of these pairs."""
    values = activate(gate, "silu") * up
    store_tile(activated, values, None, columns, pair, 0, num_pairs, intermediate_size)


@triton.jit
def store_weighted(weighted, result, probabilities, columns, pair, num_pairs, hidden_size):
    """Store the results of these pairs, [columns, rows], times their probabilities, to their rows."""
    probability = tl.load(probabilities + pair, mask=pair < num_pairs, other=0.0)[None, :]
    store_tile(weighted, result * probability, None, columns, pair, 0, num_pairs, hidden_size)
