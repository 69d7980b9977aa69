"""The Triton mixture of experts against float64, and its tiles against a count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import fused_moe
from triptych_kernels.triton.moe.routing import most_tiles, route

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp", "ignore:invalid value encountered"
)  # of the interpreter: inf and NaN, as on GPUs

# sums of up to a hundred products in float32; silu(gate) * up and the result are rounded to the dtype
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2**-8, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2e-2},
}
SIZES = {  # num_tokens, num_experts, top_k, hidden_size, intermediate_size
    "one token, top-1": (1, 4, 1, 32, 48),
    "one token, all experts": (1, 3, 3, 17, 10),
    "Mixtral's": (7, 8, 2, 64, 96),
    "odd sizes, five experts": (33, 5, 2, 50, 70),
    "one expert": (9, 1, 1, 16, 16),
    "more experts than tokens, top-6": (3, 20, 6, 24, 40),
    "more pairs than the tile before the largest": (70, 2, 2, 33, 20),
    "more pairs than the largest tile": (130, 1, 1, 16, 20),
    "blocks divide everything": (2, 2, 2, 128, 128),
}


def operands(
    num_tokens: int, num_experts: int, hidden_size: int, inner: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router logits, w13 and w2 whose results are about 1."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    return (
        normal(num_tokens, hidden_size),
        normal(num_tokens, num_experts).float(),
        normal(num_experts, 2 * inner, hidden_size, scale=hidden_size**-0.5),
        normal(num_experts, hidden_size, inner, scale=inner**-0.5),
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_mixes_like_the_reference(sizes: str, dtype: torch.dtype, device: torch.device) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    given = operands(num_tokens, num_experts, hidden_size, inner, dtype, device)
    expected = fused_moe(*given, top_k=top_k, renormalize=top_k == 2, impl="reference")
    with poisoned_allocations():
        out = fused_moe(*given, top_k=top_k, renormalize=top_k == 2, impl="triton")
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


def test_all_tokens_may_choose_one_expert_and_none_another(device: torch.device) -> None:
    x, _, w13, w2 = operands(40, 4, 32, 24, torch.float32, device)
    logits = torch.tensor([-1.0, 5.0, 2.0, -9.0], device=device).expand(40, 4).clone()
    for top_k in (1, 2):
        expected = fused_moe(x, logits, w13, w2, top_k=top_k, impl="reference")
        with poisoned_allocations():
            out = fused_moe(x, logits, w13, w2, top_k=top_k, impl="triton")
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    given = operands(0, 4, 32, 24, torch.float32, device)
    assert fused_moe(*given, top_k=2, impl="triton").shape == (0, 32)


def test_of_equal_logits_the_lowest_experts_are_chosen(device: torch.device) -> None:
    x, _, w13, w2 = operands(3, 6, 16, 16, torch.float32, device)
    logits = torch.tensor([[0.0] * 6, [1.0, 3.0, 3.0, 2.0, 3.0, 3.0], [-1.0, -2.0, -1.0, -1.0, -4.0, -1.0]])
    logits = logits.to(device)
    expected = fused_moe(x, logits, w13, w2, top_k=2, impl="reference")
    out = fused_moe(x, logits, w13, w2, top_k=2, impl="triton")
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_a_token_of_nan_shows_in_no_other_token(device: torch.device) -> None:
    given = operands(5, 4, 32, 24, torch.float32, device)
    clean = fused_moe(*given, top_k=2, impl="triton")
    given[0][2], given[1][2] = torch.nan, torch.nan
    out = fused_moe(*given, top_k=2, impl="triton")
    assert out[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert torch.equal(out[others], clean[others])


def test_inputs_may_be_views(device: torch.device) -> None:
    x, logits, w13, w2 = operands(6, 4, 32, 24, torch.float32, device)
    wide_x, wide_logits = (
        torch.full((6, 40), torch.nan, device=device),
        torch.full((6, 9), 99.0, device=device),
    )
    wide_x[:, 3:35], wide_logits[:, 2:6] = x, logits
    out = fused_moe(wide_x[:, 3:35], wide_logits[:, 2:6], w13, w2, top_k=2, impl="triton")
    assert torch.equal(out, fused_moe(x, logits, w13, w2, top_k=2, impl="triton"))


@pytest.mark.parametrize("num_tokens", [1, 15, 64, 65, 130])
def test_every_pair_has_a_row_in_a_tile_of_its_expert(num_tokens: int, device: torch.device) -> None:
    num_experts, top_k, block_m = 40, 2, 16
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits[:, 7] += 3.0  # many choose this one
    with poisoned_allocations():
        routing = route(logits.to(device), top_k, True, block_m)
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
def test_no_spread_of_pairs_needs_more_tiles_than_there_is_room_for(num_experts: int) -> None:
    def spreads(num_pairs: int, experts: int) -> list[tuple[int, ...]]:
        if experts == 1:
            return [(num_pairs,)]
        return [(n, *rest) for n in range(num_pairs + 1) for rest in spreads(num_pairs - n, experts - 1)]

    for num_pairs in range(1, 12):
        worst = max(sum(-(-n // 3) for n in spread) for spread in spreads(num_pairs, num_experts))
        assert most_tiles(num_pairs, num_experts, 3) == worst
