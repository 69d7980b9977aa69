"""Mixtures of experts with plain and packed weights against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import fused_moe
from triptych_kernels.weights.packed import PackedWeight

# bfloat16: silu(gate) * up and the result are rounded, with plain weights every product
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2e-2}}
SIZES = {  # num_tokens, num_experts, top_k, hidden_size, intermediate_size
    "no token": (0, 4, 2, 32, 48),
    "one token, top-1": (1, 4, 1, 32, 48),
    "Mixtral's": (25, 8, 2, 64, 96),
    "odd sizes, all experts": (7, 3, 3, 18, 10),
    "more experts than tokens": (3, 20, 6, 24, 40),
}


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Packed for each instruction set that this processor has, and plain."""
    with forced_isa("" if request.param == "plain" else request.param):
        use_threads(2)
        yield request.param


def operands(
    num_tokens: int, num_experts: int, hidden_size: int, inner: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router logits, w13 and w2 whose results are about 1."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return (
        normal(num_tokens, hidden_size),
        normal(num_tokens, num_experts).float(),
        normal(num_experts, 2 * inner, hidden_size, scale=hidden_size**-0.5),
        normal(num_experts, hidden_size, inner, scale=inner**-0.5),
    )


def pack(form: str, w13: Tensor, w2: Tensor) -> dict[str, Any]:
    """The weights in the form under test, packed ones expert by expert."""
    if form == "plain":
        return {"w13": w13, "w2": w2}
    packed: dict[str, list[PackedWeight]] = {"w13": [], "w2": []}
    for gate_up, down in zip(w13, w2, strict=True):
        first, second = (
            PackedWeight(*gate_up.shape, w13.dtype, gated=True),
            PackedWeight(*down.shape, w2.dtype),
        )
        for half, rows in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            first.fill_rows(0, rows, half)
        second.fill_rows(0, down)
        packed["w13"].append(first)
        packed["w2"].append(second)
    return dict(packed)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_mixes_like_the_reference(form: str, sizes: str, dtype: torch.dtype, renormalize: bool) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    x, logits, w13, w2 = operands(num_tokens, num_experts, hidden_size, inner, dtype)
    options = {"top_k": top_k, "renormalize": renormalize}
    expected = fused_moe(x, logits, w13, w2, **options, impl="reference")
    out = fused_moe(x, logits, **pack(form, w13, w2), **options)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


def test_of_equal_logits_the_lowest_experts_are_chosen(form: str) -> None:
    x, _, _, w2 = operands(1, 6, 4, 4, torch.float32)
    x, w13 = torch.ones(1, 4), torch.ones(6, 8, 4)
    w2 = torch.stack([torch.full((4, 4), 10.0**expert) for expert in range(6)])  # a digit for each expert
    one = fused_moe(x, torch.tensor([[9.0] + [0.0] * 5]), **pack(form, w13, w2), top_k=1)
    for logits, chosen in (([0.0] * 6, (0, 1)), ([1.0, 3.0, 3.0, 2.0, 3.0, 3.0], (1, 2))):
        out = fused_moe(x, torch.tensor([logits]), **pack(form, w13, w2), top_k=2)
        expected = one * sum(10.0**expert for expert in chosen) / 2
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_is_the_same_in_every_batch(form: str, dtype: torch.dtype) -> None:
    if form == "plain":
        pytest.skip("torch chooses its sums by the shape")
    x, logits, w13, w2 = operands(40, 8, 64, 96, dtype)
    weights = pack(form, w13, w2)
    whole = fused_moe(x, logits, **weights, top_k=2)
    for start, end in ((0, 1), (3, 7), (7, 30)):
        assert torch.equal(fused_moe(x[start:end], logits[start:end], **weights, top_k=2), whole[start:end])


def test_a_token_of_nan_shows_in_no_other_token(form: str) -> None:
    x, logits, w13, w2 = operands(5, 4, 32, 24, torch.float32)
    weights = pack(form, w13, w2)
    clean = fused_moe(x, logits, **weights, top_k=2)
    x[2], logits[2] = torch.nan, torch.nan
    out = fused_moe(x, logits, **weights, top_k=2)
    assert out[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(out[others], clean[others])


def test_operands_that_do_not_fit_are_named(form: str) -> None:
    x, logits, w13, w2 = operands(3, 4, 16, 8, torch.float32)
    weights = pack(form, w13, w2)
    with pytest.raises(ValueError, match=r"x \[3, 15\] does not fit w2 \[4, 16, 8\]"):
        fused_moe(x[:, :15], logits, **weights, top_k=2)
    with pytest.raises(ValueError, match=r"router_logits \[3, 3\] torch.float32 must be .* = \[3, 4\]"):
        fused_moe(x, logits[:, :3], **weights, top_k=2)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k {top_k} must be from 1 to the number of experts, 4"):
            fused_moe(x, logits, **weights, top_k=top_k)
    with pytest.raises(ValueError, match=r"w13 \[3, 16, 16\] and w2 \[4, 16, 8\] must be"):
        fused_moe(x, logits, weights["w13"][:3], weights["w2"], top_k=2)
    with pytest.raises(ValueError, match=r"w13 \[4, 16, 16\] must be .* for inputs in torch.bfloat16"):
        fused_moe(x.bfloat16(), logits, **weights, top_k=2)
