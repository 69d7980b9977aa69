"""A mixture of experts in five launches: choose, gather into tiles, two products, sum."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton
from torch import Tensor

from triptych_kernels.triton.moe_products import SUM_BLOCK, down_product, gate_up_product, sum_pairs
from triptych_kernels.triton.moe_routing import route

_GROUP = 16  # tiles; of 128 rows of 4,096 elements in bfloat16 they hold 16 MB, a third of an H200's L2 cache


@dataclass(frozen=True, slots=True)
class _Tile:
    """How one program computes its part of a product."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def fused_moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalize: bool
) -> Tensor:
    num_tokens, hidden_size = x.shape
    num_experts, _, intermediate_size = w2.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_pairs = num_tokens * top_k
    gate_up_tile, down_tile = _choose_tiles(num_pairs / num_experts, x.itemsize)
    routing = route(router_logits, top_k, renormalize, gate_up_tile.BLOCK_M)
    max_tiles = len(routing.tile_rows)
    activated = torch.empty(len(routing.pairs), intermediate_size, dtype=x.dtype, device=x.device)
    # with one expert per token there is nothing to add: its product is the result
    weighted = out
    if top_k > 1:
        weighted = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    tiles = routing.pairs, routing.tile_experts, routing.tile_rows, max_tiles
    gate_up_product[(max_tiles * triton.cdiv(intermediate_size, gate_up_tile.BLOCK_N),)](
        x, x.stride(0), w13, activated, *tiles, hidden_size, intermediate_size,
        TOP_K=top_k, GROUP=_GROUP, **_options(gate_up_tile, intermediate_size, hidden_size),
    )  # fmt: skip
    down_product[(max_tiles * triton.cdiv(hidden_size, down_tile.BLOCK_N),)](
        activated, w2, routing.probabilities, weighted, *tiles, hidden_size, intermediate_size,
        GROUP=_GROUP, **_options(down_tile, hidden_size, intermediate_size),
    )  # fmt: skip
    if top_k > 1:
        sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
            weighted, out, hidden_size, TOP_K=top_k, BLOCK=SUM_BLOCK
        )
    return out


_TILES: tuple[tuple[_Tile, _Tile], ...] = (
    (_Tile(16, 64, 128, 4, 4), _Tile(16, 64, 128, 4, 4)),
    (_Tile(32, 64, 128, 4, 4), _Tile(32, 128, 128, 4, 4)),
    (_Tile(64, 64, 64, 4, 4), _Tile(64, 128, 64, 4, 4)),
    (_Tile(128, 128, 64, 8, 4), _Tile(128, 256, 64, 8, 4)),
)
"""For the two products, by rising BLOCK_M, which they share.

Few rows per expert: weights are read and little else is done, so a program keeps some 100 KB of them on their way, and
two fit on a multiprocessor. Many rows: the largest accumulator that fits into the registers, gate and up side by side
in the first product; 128 x 256 x 64 is what a multiprocessor needs so that the tensor cores wait for nobody.
"""


def _choose_tiles(pairs_per_expert: float, itemsize: int) -> tuple[_Tile, _Tile]:
    """The smallest tile that holds an expert's rows if all have as many: then each weight is read once.

    Tensor cores add in another order for other tiles, so a token's last bits may change with the size of its batch, as
    they do with cuBLAS.
    """
    gate_up, down = next((pair for pair in _TILES if pairs_per_expert <= pair[0].BLOCK_M), _TILES[-1])
    shrink = itemsize // 2  # float32 takes twice the room of bfloat16
    return (
        replace(gate_up, BLOCK_K=gate_up.BLOCK_K // shrink),
        replace(down, BLOCK_K=down.BLOCK_K // shrink),
    )


def _options(tile: _Tile, num_columns: int, inner_size: int) -> dict[str, int | bool]:
    is_even = num_columns % tile.BLOCK_N == 0 and inner_size % tile.BLOCK_K == 0
    return {**asdict(tile), "EVEN": is_even}
