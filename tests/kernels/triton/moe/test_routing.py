"""The tiles of a mixture of experts against a count by hand."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.triton.moe.routing import most_tiles, route

# of the interpreter: NaN, as on GPUs
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@pytest.mark.parametrize("scale", [1.0, 2.0])  # torch chooses where there is a factor
@pytest.mark.parametrize("num_tokens", [1, 15, 64, 65, 130])
def test_every_pair_has_a_row_in_a_tile_of_its_expert(
    num_tokens: int, scale: float, device: torch.device
) -> None:
    num_experts, top_k, block_m = 40, 2, 16
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits[:, 7] += 3.0  # many choose this one
    with poisoned_allocations():
        routing = route(logits.to(device), ExpertChoice(top_k, scale=scale), block_m)
    expert_to_pairs: dict[int, set[int]] = {}
    for token, row in enumerate(logits.tolist()):
        order = sorted(range(num_experts), key=lambda expert: -row[expert])
        for rank in range(top_k):
            expert_to_pairs.setdefault(order[rank], set()).add(token * top_k + rank)
    found: dict[int, set[int]] = {}
    pairs = routing.pairs.view(-1, block_m).tolist()
    for tile, expert, num_rows in zip(
        pairs, routing.tile_experts.tolist(), routing.tile_rows.tolist(), strict=True
    ):
        assert 0 <= num_rows <= block_m
        assert len(set(tile[:num_rows])) == num_rows
        if num_rows:
            found.setdefault(expert, set()).update(tile[:num_rows])
    assert found == expert_to_pairs
    used = sum(-(-len(each) // block_m) for each in expert_to_pairs.values())
    assert sum(num_rows > 0 for num_rows in routing.tile_rows.tolist()) == used


@pytest.mark.parametrize("num_experts", [1, 2, 5])
def test_no_spread_of_pairs_needs_more_tiles(num_experts: int) -> None:
    def spreads(num_pairs: int, experts: int) -> list[tuple[int, ...]]:
        if experts == 1:
            return [(num_pairs,)]
        return [(n, *rest) for n in range(num_pairs + 1) for rest in spreads(num_pairs - n, experts - 1)]

    for num_pairs in range(1, 12):
        worst = max(sum(-(-n // 3) for n in spread) for spread in spreads(num_pairs, num_experts))
        assert most_tiles(num_pairs, num_experts, 3) == worst
