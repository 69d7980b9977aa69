"""Mixtures of experts with plain and packed weights against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from tests.kernels.ops.weights import fill_weight, random
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import ACTIVATIONS, GATED_ACTIVATIONS, fused_moe
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.packed import PackedStack, PackedWeight

# of Triton's interpreter: inf and NaN, as on GPUs
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp", "ignore:invalid value encountered"
)

# sums of up to a hundred products; silu(gate) * up and the result are rounded, by torch every product
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2**-8, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2e-2},
}
SIZES = {  # num_tokens, num_experts, top_k, hidden_size, intermediate_size
    "no token": (0, 4, 2, 32, 48),
    "one token, top-1": (1, 4, 1, 32, 48),
    "one token, all experts": (1, 3, 3, 18, 10),
    "Mixtral's, few tokens": (7, 8, 2, 64, 96),
    "Mixtral's": (25, 8, 2, 64, 96),
    "odd sizes, all experts": (7, 3, 3, 18, 10),
    "odd sizes, five experts": (33, 5, 2, 50, 70),
    "one expert": (9, 1, 1, 16, 16),
    "more experts than tokens": (3, 20, 6, 24, 40),
    "more pairs than the tile before the largest": (70, 2, 2, 34, 20),
    "more pairs than the largest tile": (130, 1, 1, 16, 20),
    "blocks divide everything": (2, 2, 2, 128, 128),
}

case = cases_of("fused_moe")
implementation = implementations_of("fused_moe")


def operands(
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    inner: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, router logits, w13 and w2 with results of about 1."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    return (
        normal(num_tokens, hidden_size),
        normal(num_tokens, num_experts).float(),
        normal(num_experts, 2 * inner, hidden_size, scale=hidden_size**-0.5),
        normal(num_experts, hidden_size, inner, scale=inner**-0.5),
    )


def weights_for(
    implementation: Implementation,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> dict[str, Any]:
    """Return the weights and biases as the implementation takes them: stacked, or packed expert by expert."""
    if not implementation.isa:
        return {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}

    def pack(weights: Tensor, biases: Tensor | None, *, gated: bool) -> PackedStack:
        has_bias = biases is not None
        stack = PackedStack(
            [PackedWeight(*w.shape, weights.dtype, gated=gated, bias=has_bias) for w in weights]
        )
        for number, weight in enumerate(weights):
            fill_weight(stack[number], weight, None if biases is None else biases[number])
        return stack

    is_gated = w13.shape[1] > w2.shape[2]
    return {"w13": pack(w13, w13_bias, gated=is_gated), "w2": pack(w2, w2_bias, gated=False)}


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_mixes_like_the_reference(sizes: str, renormalize: bool, case: Case) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    x, logits, w13, w2 = operands(num_tokens, num_experts, hidden_size, inner, case.device, case.dtype)
    choice = ExpertChoice(top_k, renormalize=renormalize)
    expected = fused_moe(x, logits, w13, w2, choice, impl="reference")
    out = case(fused_moe, x, logits, **weights_for(case.implementation, w13, w2), choice=choice)
    torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("biased", ["both", "w13", "w2"])
@pytest.mark.parametrize("sizes", ["one token, top-1", "odd sizes, five experts", "blocks divide everything"])
def test_biases_are_added_before_activation_and_probability(sizes: str, biased: str, case: Case) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    x, logits, w13, w2 = operands(num_tokens, num_experts, hidden_size, inner, case.device, case.dtype)
    # smaller than the products, which torch rounds before the activation
    biases = {
        "w13_bias": random(num_experts, 2 * inner, dtype=case.dtype, device=case.device) / 4,
        "w2_bias": random(num_experts, hidden_size, dtype=case.dtype, device=case.device) / 4,
    }
    if biased != "both":
        biases = {f"{biased}_bias": biases[f"{biased}_bias"]}
    options = {"choice": ExpertChoice(top_k), "activation": "swiglu_oai"}
    expected = fused_moe(x, logits, w13, w2, **biases, **options, impl="reference")
    out = case(fused_moe, x, logits, **weights_for(case.implementation, w13, w2, **biases), **options)
    torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_experts_have_the_activations_of_gated_linear(
    activation: str, implementation: Implementation
) -> None:
    x, logits, w13, w2 = operands(7, 3, 18, 10, implementation.device)
    x *= 4  # far enough for the limits of GPT-OSS
    expected = fused_moe(x, logits, w13, w2, choice=ExpertChoice(2), activation=activation, impl="reference")
    weights = weights_for(implementation, w13, w2)
    out = implementation(fused_moe, x, logits, **weights, choice=ExpertChoice(2), activation=activation)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "sizes", ["one token, top-1", "odd sizes, five experts", "more pairs than the largest tile"]
)
def test_experts_may_have_no_gate(sizes: str, biased: bool, case: Case) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    x, logits, w13, w2 = operands(num_tokens, num_experts, hidden_size, inner, case.device, case.dtype)
    w1 = w13[:, inner:] / 2  # squares of what torch rounds
    biases, options = {}, {"choice": ExpertChoice(top_k), "activation": "relu2"}
    if biased:
        biases["w13_bias"] = random(num_experts, inner, dtype=case.dtype, device=case.device) / 4
        biases["w2_bias"] = random(num_experts, hidden_size, dtype=case.dtype, device=case.device) / 4
    weights = weights_for(case.implementation, w1, w2, **biases)
    if case.implementation.is_triton:
        with pytest.raises(ValueError, match="experts without a gate are not computed by Triton"):
            case(fused_moe, x, logits, **weights, **options)
        return
    expected = fused_moe(x, logits, w1, w2, **biases, **options, impl="reference")
    out = case(fused_moe, x, logits, **weights, **options)
    torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_without_a_gate_have_the_activations_of_linear(
    activation: str, implementation: Implementation
) -> None:
    x, logits, w13, w2 = operands(7, 3, 18, 10, implementation.device)
    w1, options = w13[:, 10:].contiguous(), {"choice": ExpertChoice(2), "activation": activation}
    expected = fused_moe(x, logits, w1, w2, **options, impl="reference")
    weights = weights_for(implementation, w1, w2)
    if implementation.is_triton:
        with pytest.raises(ValueError, match="experts without a gate are not computed by Triton"):
            implementation(fused_moe, x, logits, **weights, **options)
        return
    out = implementation(fused_moe, x, logits, **weights, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_all_tokens_may_choose_one_expert_and_none_another(implementation: Implementation) -> None:
    x, _, w13, w2 = operands(40, 4, 32, 24, implementation.device)
    logits = torch.tensor([-1.0, 5.0, 2.0, -9.0], device=implementation.device).expand(40, 4).clone()
    for top_k in (1, 2):
        expected = fused_moe(x, logits, w13, w2, choice=ExpertChoice(top_k), impl="reference")
        out = implementation(
            fused_moe, x, logits, **weights_for(implementation, w13, w2), choice=ExpertChoice(top_k)
        )
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_of_equal_logits_the_lowest_experts_are_chosen(implementation: Implementation) -> None:
    device = implementation.device
    # a digit for each expert
    x, w13 = torch.ones(1, 4, device=device), torch.ones(6, 8, 4, device=device)
    w2 = torch.stack([torch.full((4, 4), 10.0**expert, device=device) for expert in range(6)])
    weights = weights_for(implementation, w13, w2)
    first = torch.tensor([[9.0] + [0.0] * 5], device=device)
    one = implementation(fused_moe, x, first, **weights, choice=ExpertChoice(1))
    equal = (
        ([0.0] * 6, (0, 1)),
        ([1.0, 3.0, 3.0, 2.0, 3.0, 3.0], (1, 2)),
        ([-1.0, -2.0, -1.0, -1.0, -4.0, -1.0], (0, 2)),
    )
    for logits, chosen in equal:
        out = implementation(
            fused_moe, x, torch.tensor([logits], device=device), **weights, choice=ExpertChoice(2)
        )
        torch.testing.assert_close(out, one * sum(10.0**expert for expert in chosen) / 2)


def test_a_token_has_the_same_bits_in_any_batch(case: Case) -> None:
    if not case.implementation.isa:
        pytest.skip("torch chooses its sums by the shape, Triton its tiles by the number of rows")
    x, logits, w13, w2 = operands(40, 8, 64, 96, case.device, case.dtype)
    weights = weights_for(case.implementation, w13, w2)
    whole = fused_moe(x, logits, **weights, choice=ExpertChoice(2))
    for start, end in ((0, 1), (3, 7), (7, 30)):
        assert torch.equal(
            fused_moe(x[start:end], logits[start:end], **weights, choice=ExpertChoice(2)), whole[start:end]
        )


def test_a_token_of_nan_affects_no_other_token(implementation: Implementation) -> None:
    x, logits, w13, w2 = operands(5, 4, 32, 24, implementation.device)
    weights = weights_for(implementation, w13, w2)
    clean = implementation(fused_moe, x, logits, **weights, choice=ExpertChoice(2))
    x[2], logits[2] = torch.nan, torch.nan
    out = implementation(fused_moe, x, logits, **weights, choice=ExpertChoice(2))
    assert out[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4], device=implementation.device)
    if implementation.is_triton:
        assert torch.equal(out[others], clean[others])
    else:
        torch.testing.assert_close(out[others], clean[others])


def test_inputs_may_be_views(implementation: Implementation) -> None:
    x, logits, w13, w2 = operands(6, 4, 32, 24, implementation.device)
    weights = weights_for(implementation, w13, w2)
    wide_x = torch.full((6, 40), torch.nan, device=implementation.device)
    wide_logits = torch.full((6, 9), 99.0, device=implementation.device)
    wide_x[:, 3:35], wide_logits[:, 2:6] = x, logits
    out = implementation(fused_moe, wide_x[:, 3:35], wide_logits[:, 2:6], **weights, choice=ExpertChoice(2))
    assert torch.equal(out, implementation(fused_moe, x, logits, **weights, choice=ExpertChoice(2)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", ["one token, top-1", "Mixtral's", "odd sizes, five experts"])
def test_ranks_of_experts_sum_to_the_whole(sizes: str, score: str, case: Case) -> None:
    num_tokens, num_experts, top_k, hidden_size, inner = SIZES[sizes]
    x, logits, w13, w2 = operands(num_tokens, num_experts, hidden_size, inner, case.device, case.dtype)
    choice = ExpertChoice(top_k, score)
    total = torch.zeros(x.shape, device=case.device)
    for first, end in ((0, 1), (1, 3), (3, num_experts)):
        weights = weights_for(case.implementation, w13[first:end], w2[first:end])
        out = case(fused_moe, x, logits, **weights, choice=choice, first_expert=first)
        own = fused_moe(
            x, logits, w13[first:end], w2[first:end], choice, first_expert=first, impl="reference"
        )
        torch.testing.assert_close(out, own, **TOLERANCE[case.dtype])
        total += own
    whole = fused_moe(x.float(), logits, w13.float(), w2.float(), choice, impl="reference")
    torch.testing.assert_close(total, whole, **TOLERANCE[case.dtype])


def test_experts_of_another_rank_are_not_read(case: Case) -> None:
    x, logits, w13, w2 = operands(9, 6, 32, 24, case.device, case.dtype)
    logits[:, 4:] += 100.0  # all choose the last two
    weights = weights_for(case.implementation, w13[:3], w2[:3])
    shared = torch.randn(9, 32).to(x)
    out = case(fused_moe, x, logits, **weights, choice=ExpertChoice(2), shared=shared, first_expert=0)
    assert torch.equal(out, shared)


def test_operands_that_do_not_fit_are_named(implementation: Implementation) -> None:
    x, logits, w13, w2 = operands(3, 4, 16, 8, torch.device("cpu"))
    weights = weights_for(implementation, w13, w2)
    with pytest.raises(ValueError, match=r"x \[3, 15\] does not fit w2 \[4, 16, 8\]"):
        fused_moe(x[:, :15], logits, **weights, choice=ExpertChoice(2))
    with pytest.raises(ValueError, match=r"router_logits \[3, 3\] torch.float32 must be .* = \[3, 4\]"):
        fused_moe(x, logits[:, :3], **weights, choice=ExpertChoice(2))
    own = weights_for(implementation, w13[:3], w2[:3])
    for first in (-1, 2):
        with pytest.raises(ValueError, match=f"first_expert {first} with 3 experts must be among the 4"):
            fused_moe(x, logits, **own, choice=ExpertChoice(2), first_expert=first)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k {top_k} must be from 1 to the number of experts, 4"):
            fused_moe(x, logits, **weights, choice=ExpertChoice(top_k))
    with pytest.raises(ValueError, match=r"w13 \[3, 16, 16\] and w2 \[4, 16, 8\] must be"):
        fused_moe(x, logits, weights["w13"][:3], weights["w2"], choice=ExpertChoice(2))
    with pytest.raises(ValueError, match=r"w13 \[4, 16, 16\] must be .* for inputs in torch.bfloat16"):
        fused_moe(x.bfloat16(), logits, **weights, choice=ExpertChoice(2))
    with pytest.raises(ValueError, match="fused_moe: activation 'tanh' is none of silu"):
        fused_moe(x, logits, **weights, choice=ExpertChoice(2), activation="tanh")
    without_gate = weights_for(implementation, w13[:, :8].contiguous(), w2)
    with pytest.raises(ValueError, match="fused_moe: activation 'swiglu_oai' is none of silu"):
        fused_moe(x, logits, **without_gate, choice=ExpertChoice(2), activation="swiglu_oai")
    if implementation.isa:
        plain = PackedStack([PackedWeight(16, 16, torch.float32) for _ in range(4)])
        with pytest.raises(
            ValueError, match=r"LinearWeights of w13 must be gated as its shape \[4, 16, 16\] says"
        ):
            fused_moe(x, logits, plain, weights["w2"], choice=ExpertChoice(2))
    weights |= {"w2_bias": torch.zeros(4, 15)}
    why = "must be None with LinearWeights" if implementation.isa else r"does not fit w2 \[4, 16, 8\]"
    with pytest.raises(ValueError, match=rf"w2_bias \[4, 15\].* {why}"):
        fused_moe(x, logits, **weights, choice=ExpertChoice(2))


_MIXTRAL = 8, 2, 4096, 14336  # num_experts, top_k, hidden_size, intermediate_size


def _plain(num_tokens: int, num_experts: int, top_k: int, hidden_size: int, inner: int) -> object:
    return fused_moe(
        meta(num_tokens, hidden_size),
        meta_float32(num_tokens, num_experts),
        meta(num_experts, 2 * inner, hidden_size),
        meta(num_experts, hidden_size, inner),
        choice=ExpertChoice(top_k),
        impl="triton",
    )


def _with_biases(num_tokens: int) -> object:
    """Mix as GPT-OSS 20B does."""
    num_experts, hidden_size, inner = 32, 2880, 2880
    return fused_moe(
        meta(num_tokens, hidden_size),
        meta_float32(num_tokens, num_experts),
        meta(num_experts, 2 * inner, hidden_size),
        meta(num_experts, hidden_size, inner),
        choice=ExpertChoice(4),
        activation="swiglu_oai",
        w13_bias=meta(num_experts, 2 * inner),
        w2_bias=meta(num_experts, hidden_size),
        impl="triton",
    )


def _stacked(num_tokens: int, create: Any, *format: object, **options: bool) -> object:
    """Mix with quantized weights of Mixtral's size."""
    num_experts, top_k, hidden_size, inner = _MIXTRAL
    stacks = [
        create(
            num_experts, *shape, torch.bfloat16, *format, device=torch.device("meta"), gated=gated, **options
        )
        for gated, shape in ((True, (2 * inner, hidden_size)), (False, (hidden_size, inner)))
    ]
    return fused_moe(
        meta(num_tokens, hidden_size),
        meta_float32(num_tokens, num_experts),
        *stacks,
        choice=ExpertChoice(top_k),
    )


def _groups(num_tokens: int, bits: int, *, affine: bool = False, **options: bool) -> object:
    return _stacked(
        num_tokens, GroupQuantizedExperts, QuantizedFormat(bits, "minimum" if affine else "none"), **options
    )


MODEL_CALLS = {
    "Mixtral, 1 token": ModelCall(lambda: _plain(1, *_MIXTRAL)),
    "Mixtral, 128 tokens": ModelCall(lambda: _plain(128, *_MIXTRAL)),
    "Mixtral, 256 tokens": ModelCall(lambda: _plain(256, *_MIXTRAL)),
    "Mixtral, 4096 tokens": ModelCall(lambda: _plain(4096, *_MIXTRAL)),
    "128 experts": ModelCall(lambda: _plain(256, 128, 8, 2048, 768)),
    "GPT-OSS, 1 token": ModelCall(lambda: _with_biases(1)),
    "GPT-OSS, 4096 tokens": ModelCall(lambda: _with_biases(4096)),
    "4 bits, 1 token": ModelCall(lambda: _groups(1, 4, affine=True)),
    "4 bits, 128 tokens": ModelCall(lambda: _groups(128, 4, affine=True)),
    "4 bits, 256 tokens": ModelCall(lambda: _groups(256, 4, affine=True)),
    "4 bits, 4096 tokens by weights": ModelCall(lambda: _groups(4096, 4, affine=True, batch_invariant=False)),
    "8 bits, 1 token": ModelCall(lambda: _groups(1, 8)),
    "8 bits, 4096 tokens by weights": ModelCall(lambda: _groups(4096, 8, batch_invariant=False)),
    "int8, 1 token": ModelCall(lambda: _stacked(1, ChannelQuantizedExperts, torch.int8)),
    "float8, 4096 tokens": ModelCall(lambda: _stacked(4096, ChannelQuantizedExperts, torch.float8_e4m3fn)),
}


def launch_small(draw: SmallOperands) -> None:
    w13, w2 = draw.normal(4, 2 * 48, 40), draw.normal(4, 40, 48)
    fused_moe(draw.normal(7, 40), draw.normal(7, 4), w13, w2, choice=ExpertChoice(2), impl="triton")
    biases = {"w13_bias": draw.normal(4, 2 * 48), "w2_bias": draw.normal(4, 40)}
    fused_moe(draw.normal(7, 40), draw.normal(7, 4), w13, w2, **biases, choice=ExpertChoice(2), impl="triton")
    for bits in (4, 8):
        _launch_quantized(
            draw, GroupQuantizedExperts, QuantizedFormat(bits, "minimum" if bits == 4 else "none")
        )
    for element in LARGEST_ELEMENT:
        _launch_quantized(draw, ChannelQuantizedExperts, element)


def _launch_quantized(draw: SmallOperands, create: Any, *format: object) -> None:
    """Mix one row, a few and many per expert."""
    w13 = create(4, 2 * 160, 96, draw.dtype, *format, device=draw.device, gated=True)
    w2 = create(4, 96, 160, draw.dtype, *format, device=draw.device)
    for stack in (w13, w2):
        for weight in stack:
            weight.fill_rows(0, draw.normal(*weight.shape))
    for num_tokens in (1, 7, 70):
        fused_moe(draw.normal(num_tokens, 96), draw.normal(num_tokens, 4), w13, w2, choice=ExpertChoice(2))
