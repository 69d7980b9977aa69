"""The choice of experts for each token, and the tokens of each expert gathered into tiles, all on the device.

A pair is a token with one of its experts, number token * top_k + rank. Tiles are BLOCK_M rows of one expert each:

    expert   0    0    1    3          no token chose 2
    tile   | 0  | 1  | 2  | 3  | -  |  grids have programs for the most tiles possible; unused tiles have no rows
    rows     16   3    16   7    0

Where ranks share the experts, those of other ranks count as one that is last, of which no tile has rows.

There are two kernels, as every program of the second needs the counts of all programs of the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.torch.moe import choose_experts

_MOST_TOKENS = 64  # of one program
_MOST_LOGITS = 2048  # of one program: 16 per thread, several times over in registers
_COUNTS_AT_ONCE = 16  # programs that one program adds up the counts of at a time
_TILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The tiles of the products, and the row of each pair."""

    probabilities: Tensor
    """[num_tokens * top_k] float32, the factor of each pair's result."""
    pairs: Tensor
    """[max_tiles * BLOCK_M] int32, the pair of each row of each tile; undefined beyond the tile's rows."""
    tile_experts: Tensor
    """[max_tiles] int32, undefined for tiles without rows."""
    tile_rows: Tensor
    """[max_tiles] int32, from 0 to BLOCK_M."""

    @property
    def num_pairs(self) -> int:
        return len(self.probabilities)

    @property
    def max_tiles(self) -> int:
        return len(self.tile_rows)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the number of tiles for the worst spread of pairs over experts: each expert has one row too many."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block_m


def route(router_logits: Tensor, choice: ExpertChoice, block_m: int, held: range | None = None) -> Routing:
    """Choose the experts of one token or more, and fill their tiles.

    A plain choice among experts that are all here is one kernel; torch computes any other one, without waiting for the
    device.

    Args:
        held: The experts that weights are here of; None: all.
    """
    num_tokens, num_experts = router_logits.shape
    held = range(num_experts) if held is None else held
    is_shared = len(held) < num_experts
    if is_shared:
        num_experts = len(held) + 1
    top_k = choice.top_k
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(min(_MOST_TOKENS, _MOST_LOGITS // block_e), 1)
    num_programs = triton.cdiv(num_tokens, block_t)
    num_pairs = num_tokens * top_k
    max_tiles = most_tiles(num_pairs, num_experts, block_m)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=router_logits.device)

    pairs, tile_experts, tile_rows = empty(max_tiles * block_m), empty(max_tiles), empty(max_tiles)
    blocks = {
        "TOP_K": top_k,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_K": triton.next_power_of_2(top_k),
    }
    if choice.is_plain and not is_shared:
        probabilities = empty(num_pairs, dtype=torch.float32)
        experts, places, counts = empty(num_pairs), empty(num_pairs), empty(num_programs, num_experts)
        _choose[(num_programs,)](
            router_logits, router_logits.stride(0), probabilities, experts, places, counts, num_tokens, num_experts,
            RENORMALIZE=choice.renormalize, **blocks,
        )  # fmt: skip
    else:
        weights, chosen = choose_experts(router_logits, choice)
        if is_shared:
            own = chosen - held.start
            chosen = torch.where((own >= 0) & (own < len(held)), own, len(held))
        probabilities, experts = weights.flatten(), chosen.flatten().int()
        places, counts = _count(chosen, num_experts, num_programs, block_t)
    _place[(num_programs,)](
        experts, places, counts, pairs, tile_experts, tile_rows, num_tokens, num_experts, num_programs, max_tiles,
        BLOCK_M=block_m, BLOCK_P=_COUNTS_AT_ONCE, BLOCK_TILES=_TILES_AT_ONCE, **blocks,
    )  # fmt: skip
    if is_shared:
        tile_rows = torch.where(tile_experts < len(held), tile_rows, 0)
    return Routing(probabilities, pairs, tile_experts, tile_rows)


def _count(chosen: Tensor, num_experts: int, num_programs: int, block_t: int) -> tuple[Tensor, Tensor]:
    """Return what `_choose` writes beside experts and probabilities: places and counts.

    Args:
        chosen: [num_tokens, top_k], the experts of each token.
    """
    num_tokens = len(chosen)
    here = torch.zeros(
        num_programs * block_t, num_experts, dtype=torch.int32, device=chosen.device
    )  # 1 where a token has chosen an expert
    here[:num_tokens].scatter_(1, chosen, 1)
    by_program = here.view(num_programs, block_t, num_experts)
    before = by_program.cumsum(1, dtype=torch.int32) - by_program
    places = before.view(-1, num_experts)[:num_tokens].gather(1, chosen)
    return places.flatten(), by_program.sum(1, dtype=torch.int32)


@triton.jit(do_not_specialize=["num_tokens"])  # it changes from step to step
def _choose(
    router_logits, stride, probabilities, chosen_experts, places, counts, num_tokens, num_experts,
    RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose the experts of BLOCK_T tokens.

    This writes experts, probabilities, each pair's number among those of its expert in this program, and the number of
    pairs of each expert in this program.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)[None, :]
    ranks = tl.arange(0, BLOCK_K)[None, :]
    is_token = (tokens < num_tokens)[:, None]
    is_expert = experts < num_experts
    logits = tl.load(
        router_logits + tokens.to(tl.int64)[:, None] * stride + experts,
        mask=is_token & is_expert,
        other=float("-inf"),
    ).to(tl.float32)
    # NaN compares with nothing: it is chosen last, so that every choice is an expert that exists
    keys = tl.where(logits == logits, logits, float("-inf"))
    peak = tl.max(keys, 1)
    free = is_expert & (tokens >= 0)[:, None]
    count = tl.zeros((BLOCK_E,), tl.int32)
    all_chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    all_places = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, keys, float("-inf")), 1)
        chosen = tl.min(tl.where(free & (keys == best[:, None]), experts, BLOCK_E), 1)
        is_chosen = experts == chosen[:, None]
        here = (is_chosen & is_token).to(tl.int32)
        before = tl.cumsum(here, 0) - here + count[None, :]
        place = tl.sum(tl.where(is_chosen, before, 0), 1)
        weight = tl.exp(tl.sum(tl.where(is_chosen, logits, 0.0), 1) - peak)
        all_chosen = tl.where(ranks == rank, chosen[:, None], all_chosen)
        all_places = tl.where(ranks == rank, place[:, None], all_places)
        weights = tl.where(ranks == rank, weight[:, None], weights)
        count += tl.sum(here, 0)
        free = free & (experts != chosen[:, None])
    if RENORMALIZE:
        total = tl.sum(weights, 1)
    else:
        total = tl.sum(tl.exp(logits - peak[:, None]), 1)
    pairs = tokens[:, None] * TOP_K + ranks
    is_pair = is_token & (ranks < TOP_K)
    tl.store(probabilities + pairs, weights / total[:, None], mask=is_pair)
    tl.store(chosen_experts + pairs, all_chosen, mask=is_pair)
    tl.store(places + pairs, all_places, mask=is_pair)
    all_experts = tl.arange(0, BLOCK_E)
    tl.store(counts + tl.program_id(0) * num_experts + all_experts, count, mask=all_experts < num_experts)


@triton.jit(do_not_specialize=["num_tokens", "num_programs", "max_tiles"])  # they change from step to step
def _place(
    chosen_experts, places, counts, pairs, tile_experts, tile_rows,
    num_tokens, num_experts, num_programs, max_tiles,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Put the pairs of BLOCK_T tokens into their rows; the first program describes the tiles."""
    program = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)  # pairs of each expert in the programs before this one
    for first in range(0, num_programs, BLOCK_P):
        programs = (first + tl.arange(0, BLOCK_P))[:, None]
        count = tl.load(
            counts + programs * num_experts + experts[None, :],
            mask=(programs < num_programs) & (experts < num_experts)[None, :],
            other=0,
        )
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(programs < program, count, 0), 0)
    num_tiles = (total + BLOCK_M - 1) // BLOCK_M
    end_tile = tl.cumsum(num_tiles, 0)
    first_tile = end_tile - num_tiles
    first_row = first_tile * BLOCK_M + before

    tokens = program * BLOCK_T + tl.arange(0, BLOCK_T)
    for rank in tl.static_range(TOP_K):
        pair = tokens * TOP_K + rank
        chosen = tl.load(chosen_experts + pair, mask=tokens < num_tokens, other=0)
        place = tl.load(places + pair, mask=tokens < num_tokens, other=0)
        row = place + tl.sum(tl.where(experts[None, :] == chosen[:, None], first_row[None, :], 0), 1)
        tl.store(pairs + row, pair, mask=tokens < num_tokens)

    if program == 0:
        for first in range(0, max_tiles, BLOCK_TILES):
            tiles = first + tl.arange(0, BLOCK_TILES)
            # experts with all tiles before this one; for an unused tile that is BLOCK_E, which is no expert's number
            expert = tl.sum((end_tile[None, :] <= tiles[:, None]).to(tl.int32), 1)
            left = total[None, :] - (tiles[:, None] - first_tile[None, :]) * BLOCK_M
            num_rows = tl.sum(tl.where(experts[None, :] == expert[:, None], left, 0), 1)
            tl.store(tile_experts + tiles, expert, mask=tiles < max_tiles)
            tl.store(tile_rows + tiles, tl.minimum(num_rows, BLOCK_M), mask=tiles < max_tiles)
