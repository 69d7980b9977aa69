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
from torch import Tensor

from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.products import SUM_BLOCK, down_product, gate_up_product, sum_pairs
from triptych_kernels.triton.moe.routing import route
from triptych_kernels.triton.moe.tiles import TILES_IN_GROUP
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
    top_k: int,
    renormalize: bool,
) -> Tensor:
    num_tokens, hidden_size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    # with one expert per token there is nothing to add: its product is the result
    weighted = out
    if top_k > 1:
        weighted = torch.empty(num_tokens * top_k, hidden_size, dtype=torch.float32, device=x.device)
    if isinstance(w13, Tensor):
        assert isinstance(w2, Tensor), "both products have the same form of weights"
        _multiply_plain(x, router_logits, w13, w2, top_k, renormalize, weighted)
    else:
        assert isinstance(w2, type(w13)), "both products have the same form of weights"
        rows_per_expert = num_tokens * top_k / len(w13)
        routing = route(router_logits, top_k, renormalize, w13.block_m(rows_per_expert))
        w2.down(w13.gate_up(x, routing), routing, weighted)
    if top_k > 1:
        sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
            weighted, out, hidden_size, TOP_K=top_k, BLOCK=SUM_BLOCK
        )
    return out


def _multiply_plain(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalize: bool, weighted: Tensor
) -> None:
    """Write each pair's result times its probability to `weighted` [num_pairs, hidden_size]."""
    num_experts, hidden_size, intermediate_size = w2.shape
    gate_up_tile, down_tile = _choose_tiles(x, num_experts, intermediate_size, len(x) * top_k / num_experts)
    routing = route(router_logits, top_k, renormalize, gate_up_tile.BLOCK_M)
    max_tiles = routing.max_tiles
    activated = torch.empty(len(routing.pairs), intermediate_size, dtype=x.dtype, device=x.device)
    tiles = routing.pairs, routing.tile_experts, routing.tile_rows, max_tiles
    gate_up_product[(max_tiles * triton.cdiv(intermediate_size, gate_up_tile.BLOCK_N),)](
        x, x.stride(0), w13, activated, *tiles, hidden_size, intermediate_size,
        TOP_K=top_k, GROUP=TILES_IN_GROUP, **_options(gate_up_tile, intermediate_size, hidden_size),
    )  # fmt: skip
    down_product[(max_tiles * triton.cdiv(hidden_size, down_tile.BLOCK_N),)](
        activated, w2, routing.probabilities, weighted, *tiles, hidden_size, intermediate_size,
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
