"""A mixture of experts in five launches: choose, gather into tiles, two products, sum.

Two more launches round the inputs of each product if they have 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.torch.moe import add_shared
from triptych_kernels.triton.elementwise.silu_and_mul import activate_gated
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.routing import Routing, route
from triptych_kernels.triton.moe.tiles import TILES_IN_GROUP, place_of_program
from triptych_kernels.triton.tuning.tunable import Tunable, row_bucket


@dataclass(frozen=True, slots=True)
class _Tile:
    """The tile of one program of a product."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor | ExpertStack,
    w2: Tensor | ExpertStack,
    choice: ExpertChoice,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    first_expert: int,
) -> Tensor:
    has_own_biases = any(not isinstance(w, Tensor) and w[0].bias is not None for w in (w13, w2))
    if has_own_biases or (not isinstance(w13, Tensor) and activation != "silu"):
        raise ValueError(
            f"fused_moe: experts in an ExpertStack are computed with silu and without biases, not {activation}"
        )
    if w13[0].shape[0] == w2[0].shape[1]:
        raise ValueError("fused_moe: experts without a gate are not computed by Triton")
    num_tokens, hidden_size = x.shape
    top_k = choice.top_k
    # what a shared expert adds is added to sums in float32
    held = range(first_expert, first_expert + len(w13))
    empty = (
        torch.empty if len(held) == router_logits.shape[1] else torch.zeros
    )  # other ranks' experts add nothing
    out = empty(x.shape, dtype=x.dtype if shared is None else torch.float32, device=x.device)
    if not num_tokens:
        return out.to(x.dtype)
    # with one expert per token there is nothing to add: its product is the result
    weighted = out
    if top_k > 1:
        weighted = empty(num_tokens * top_k, hidden_size, dtype=torch.float32, device=x.device)
    if isinstance(w13, Tensor):
        assert isinstance(w2, Tensor), "both products have the same form of weights"
        _multiply_plain(x, router_logits, held, w13, w2, choice, activation, w13_bias, w2_bias, weighted)
    else:
        assert isinstance(w2, type(w13)), "both products have the same form of weights"
        block_m = w13.block_m(num_tokens * top_k / router_logits.shape[1])
        routing = route(router_logits, choice, block_m, held)
        x, routing = _scale_inputs(x, routing, choice)
        w2.down(w13.gate_up(x, routing), routing, weighted)
    if top_k > 1:
        sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
            weighted, out, hidden_size, TOP_K=top_k, BLOCK=SUM_BLOCK
        )
    return out if shared is None else add_shared(out, shared, shared_gate).to(x.dtype)


def _scale_inputs(x: Tensor, routing: Routing, choice: ExpertChoice) -> tuple[Tensor, Routing]:
    """Return the inputs of the first product, which has a row for each pair if they are scaled, and the routing."""
    if not choice.scales_input:
        return x, routing
    scaled = x[:, None] * routing.probabilities.view(len(x), -1, 1)
    ones = torch.ones_like(routing.probabilities)
    return scaled.to(x.dtype).flatten(0, 1), replace(routing, probabilities=ones)


def _multiply_plain(
    x: Tensor,
    router_logits: Tensor,
    held: range,
    w13: Tensor,
    w2: Tensor,
    choice: ExpertChoice,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weighted: Tensor,
) -> None:
    """Write each pair's result times its weight to `weighted` [num_pairs, hidden_size]."""
    num_experts, hidden_size, intermediate_size = w2.shape
    rows_per_expert = len(x) * choice.top_k / router_logits.shape[1]
    gate_up_tile, down_tile = _choose_tiles(x, num_experts, intermediate_size, rows_per_expert)
    routing = route(router_logits, choice, gate_up_tile.BLOCK_M, held)
    x, routing = _scale_inputs(x, routing, choice)
    max_tiles = routing.max_tiles
    activated = torch.empty(len(routing.pairs), intermediate_size, dtype=x.dtype, device=x.device)
    tiles = routing.pairs, routing.tile_experts, routing.tile_rows, max_tiles
    gate_up_product[(max_tiles * triton.cdiv(intermediate_size, gate_up_tile.BLOCK_N),)](
        x, x.stride(0), w13, w13_bias, activated, *tiles, hidden_size, intermediate_size,
        ACTIVATION=activation, TOP_K=routing.num_pairs // len(x), GROUP=TILES_IN_GROUP,
        **_options(gate_up_tile, intermediate_size, hidden_size),
    )  # fmt: skip
    down_product[(max_tiles * triton.cdiv(hidden_size, down_tile.BLOCK_N),)](
        activated, w2, w2_bias, routing.probabilities, weighted, *tiles, hidden_size, intermediate_size,
        GROUP=TILES_IN_GROUP, **_options(down_tile, hidden_size, intermediate_size),
    )  # fmt: skip


_TILES: tuple[tuple[_Tile, _Tile], ...] = (
    (_Tile(16, 64, 128, 4, 4), _Tile(16, 64, 128, 4, 4)),
    (_Tile(32, 64, 128, 4, 4), _Tile(32, 128, 128, 4, 4)),
    (_Tile(64, 64, 64, 4, 4), _Tile(64, 128, 64, 4, 4)),
    (_Tile(128, 128, 64, 8, 4), _Tile(128, 256, 64, 8, 4)),
)
"""Tiles of the two products, by rising BLOCK_M, which they share.

With few rows per expert the kernels mostly read weights, so a program keeps some 100 KB of them in flight, and two fit
on a multiprocessor. With many rows the accumulator is the largest that fits the registers, gate and up side by side in
the first product; a multiprocessor needs 128 x 256 x 64 to keep its tensor cores busy.
"""


def _choose_tiles(
    x: Tensor, num_experts: int, intermediate_size: int, rows_per_expert: float
) -> tuple[_Tile, _Tile]:
    """Return the tiles of the first product and the second, which have as many rows.

    Tensor cores add in another order for other tiles, so a token's last bits may change with the size of its batch,
    as they do with cuBLAS.
    """
    key = num_experts, x.shape[1], intermediate_size, row_bucket(rows_per_expert)
    if x.dtype == torch.float32:  # takes twice the room of bfloat16
        gate_up, down = (_default_tile(*key, index=index) for index in (0, 1))
        return replace(gate_up, BLOCK_K=gate_up.BLOCK_K // 2), replace(down, BLOCK_K=down.BLOCK_K // 2)
    return GATE_UP.chosen(x.device, *key), DOWN.chosen(x.device, *key)


def _default_tile(
    num_experts: int, hidden_size: int, intermediate_size: int, rows_per_expert: int, *, index: int
) -> _Tile:
    """Return the smallest tile that holds an expert's mean number of rows, so that each weight is read once."""
    return next((pair for pair in _TILES if rows_per_expert <= pair[0].BLOCK_M), _TILES[-1])[index]


def _candidates(
    num_experts: int, hidden_size: int, intermediate_size: int, rows_per_expert: int, *, index: int
) -> Iterator[_Tile]:
    """Yield tiles with the default's rows, for which the routing of both products is computed."""
    default = _default_tile(num_experts, hidden_size, intermediate_size, rows_per_expert, index=index)
    num_weights = 2 - index  # gate and up, or one
    for block_n, block_k, num_warps, num_stages in product((64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        sums = default.BLOCK_M * block_n * num_weights // (32 * num_warps)  # of a thread
        stage_bytes = 2 * block_k * (default.BLOCK_M + num_weights * block_n)
        if 8 <= sums <= 128 and 64 << 10 <= num_stages * stage_bytes <= 227 << 10:
            yield _Tile(default.BLOCK_M, block_n, block_k, num_warps, num_stages)


_KEY = ("num_experts", "hidden_size", "intermediate_size", "rows_per_expert")
GATE_UP, DOWN = (
    Tunable(
        name,
        _KEY,
        default=partial(_default_tile, index=index),
        candidates=partial(_candidates, index=index),
    )
    for index, name in enumerate(("fused_moe_gate_up", "fused_moe_down"))
)


def _options(tile: _Tile, num_columns: int, inner_size: int) -> dict[str, int | bool]:
    is_even = num_columns % tile.BLOCK_N == 0 and inner_size % tile.BLOCK_K == 0
    return {**asdict(tile), "EVEN": is_even}


SUM_BLOCK = 1024  # elements of a token that one program adds up


@triton.jit(do_not_specialize=["max_tiles"])  # it changes from step to step
def gate_up_product(
    x, x_stride, w13, w13_bias, activated, pairs, tile_experts, tile_rows, max_tiles, hidden_size,
    intermediate_size,
    ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N columns of activation(gate) * up of one tile to the rows `tile * BLOCK_M + i` of `activated`."""
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
        if w13_bias is not None:
            bias = w13_bias + expert * 2 * intermediate_size + columns
            is_column = columns < intermediate_size
            gate += tl.load(bias, mask=is_column, other=0.0)[None, :]
            up += tl.load(bias + intermediate_size, mask=is_column, other=0.0)[None, :]
        out = activated + (tile * BLOCK_M + row).to(tl.int64)[:, None] * intermediate_size + columns[None, :]
        inside = (row < num_rows)[:, None] & (columns < intermediate_size)[None, :]
        tl.store(out, activate_gated(gate, up, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["max_tiles"])  # it changes from step to step
def down_product(
    activated, w2, w2_bias, probabilities, weighted, pairs, tile_experts, tile_rows, max_tiles, hidden_size,
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
        if w2_bias is not None:
            bias = tl.load(w2_bias + expert * hidden_size + columns, mask=columns < hidden_size, other=0.0)
            result += bias[None, :]
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
