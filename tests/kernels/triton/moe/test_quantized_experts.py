"""Triton's mixtures of quantized experts against float64, from the weights as they are held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import fused_moe
from triptych_kernels.reference.moe import fused_moe as reference
from triptych_kernels.torch.moe import choose_experts
from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.quantized_weight import quantize_rows_to_groups
from triptych_kernels.triton.moe import quantized_experts, w8a8_experts
from triptych_kernels.triton.moe.quantized_experts import BY_INTEGERS, BY_WEIGHTS, GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.formats import QuantizedFormat

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp", "ignore:invalid value encountered"
)  # of the interpreter: inf and NaN, as on GPUs

FORMATS = [QuantizedFormat(4, "minimum"), QuantizedFormat(4), QuantizedFormat(8)]
ELEMENTS = list(LARGEST_ELEMENT)
# sums of up to a hundred products in float32; silu(gate) * up and the result are rounded to the dtype
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2**-8, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2e-2},
}
SIZES = {  # num_tokens, num_experts, top_k, hidden_size, intermediate_size
    "one token, top-1": (1, 4, 1, 96, 32),
    "one token, top-2": (1, 8, 2, 32, 96),
    "few rows": (5, 8, 2, 64, 32),
    "20 rows per expert": (20, 2, 2, 32, 64),
    "40 rows per expert": (40, 2, 2, 64, 32),
    "one expert for all": (17, 1, 1, 32, 32),
}
GROUPS = [(name, FORMATS[0]) for name in SIZES] + [("few rows", format) for format in FORMATS[1:]]
Stacks = tuple[Sequence[LinearWeight], Sequence[LinearWeight]]
Meant = tuple[Tensor, Tensor]
"""Values of the weights of both products, float64 [num_experts, out_features, in_features]."""


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small weights take several steps; the interpreter would spend its time on what lies beyond their last group."""
    choose_tiles, tunables = quantized_experts._choose_tiles, (BY_INTEGERS, BY_WEIGHTS)
    monkeypatch.setattr(
        quantized_experts,
        "_choose_tiles",
        lambda *args, **kwargs: replace(choose_tiles(*args, **kwargs), STEP=2),
    )
    for tunable in tunables:
        tunable.forget()
    yield
    for tunable in tunables:
        tunable.forget()


def group_stacks(
    sizes: tuple[int, ...], format: QuantizedFormat, dtype: torch.dtype, device: torch.device, **options: bool
) -> tuple[Stacks, Meant]:
    _, num_experts, _, hidden, inner = sizes
    with poisoned_allocations():
        w13 = GroupQuantizedExperts(
            num_experts, 2 * inner, hidden, dtype, format, device=device, gated=True, **options
        )
        w2 = GroupQuantizedExperts(num_experts, hidden, inner, dtype, format, device=device, **options)
    return (w13, w2), (fill(w13, format), fill(w2, format))


def fill(stack: GroupQuantizedExperts, format: QuantizedFormat) -> Tensor:
    """Expert by expert in an odd order, halves as they are loaded; results are about 1."""
    generator = torch.Generator().manual_seed(len(stack))
    meant = []
    for weight in reversed(stack):
        out_features, in_features = weight.shape
        rows = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
        if weight.gated:
            gate, up = rows.chunk(2)
            weight.fill_rows(0, up, half="up")
            weight.fill_rows(0, gate, half="gate")
        else:
            weight.fill_rows(3, rows[3:])
            weight.fill_rows(0, rows[:3])
        held = quantize_rows_to_groups(rows, format)
        groups = held.integers * held.scales.double()[..., None] + held.minimums.double()[..., None]
        meant.append(groups.flatten(1))
    return torch.stack(meant[::-1]).to(stack[0].device)


def channel_stacks(
    sizes: tuple[int, ...], element: torch.dtype, dtype: torch.dtype, device: torch.device
) -> tuple[Stacks, Meant]:
    """Their elements as they are, since rounding rows takes the interpreter long; results are about 1."""
    _, num_experts, _, hidden, inner = sizes
    w13 = ChannelQuantizedExperts(num_experts, 2 * inner, hidden, dtype, element, device=device, gated=True)
    w2 = ChannelQuantizedExperts(num_experts, hidden, inner, dtype, element, device=device)
    generator = torch.Generator().manual_seed(num_experts)
    meant = []
    for stack in (w13, w2):
        unit = LARGEST_ELEMENT[element] / 3
        elements = torch.randn(stack.elements.shape, generator=generator).clamp(-3, 3) * unit
        scales = torch.rand(stack.scales.shape, generator=generator) * stack.elements.shape[2] ** -0.5 / unit
        stack.elements.copy_(elements.to(element))
        stack.scales.copy_(scales)
        meant.append(stack.elements.double() * stack.scales.double()[..., None])
    return (w13, w2), (meant[0], meant[1])


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts, _, hidden, _ = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator)
    return x.to(device, dtype), torch.randn(num_tokens, num_experts, generator=generator).to(device)


@pytest.mark.parametrize(("name", "format"), GROUPS, ids=str)
def test_groups_mix_as_what_they_stand_for(
    name: str, format: QuantizedFormat, dtype: torch.dtype, device: torch.device
) -> None:
    sizes, top_k = SIZES[name], SIZES[name][2]
    stacks, meant = group_stacks(sizes, format, dtype, device)
    x, logits = inputs(sizes, dtype, device)
    with poisoned_allocations():
        out = fused_moe(x, logits, *stacks, choice=ExpertChoice(top_k, renormalize=top_k == 2))
    expected = reference(x, logits, *meant, ExpertChoice(top_k, renormalize=top_k == 2))
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("format", FORMATS[1:], ids=str)
def test_many_rows_round_their_weights_where_they_may(
    format: QuantizedFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_experts, "WIDE_ROWS", 5)  # per expert
    dtype, sizes = torch.float16, (5, 2, 2, 64, 32)
    stacks, meant = group_stacks(sizes, format, dtype, device, batch_invariant=False)
    x, logits = inputs(sizes, dtype, device)
    with poisoned_allocations():
        out = fused_moe(x, logits, *stacks, choice=ExpertChoice(2))
    expected = reference(x, logits, *(weights.to(dtype).double() for weights in meant), ExpertChoice(2))
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    few = fused_moe(x[:4], logits[:4], *stacks, choice=ExpertChoice(2))
    stacks, _ = group_stacks(sizes, format, dtype, device)
    assert torch.equal(few, fused_moe(x[:4], logits[:4], *stacks, choice=ExpertChoice(2)))
    assert not torch.equal(out, fused_moe(x, logits, *stacks, choice=ExpertChoice(2)))


def mixed_in_8_bits(
    x: Tensor, logits: Tensor, meant: Meant, element: torch.dtype, top_k: int, renormalize: bool
) -> Tensor:
    """In float64, from inputs of both products as `quantize_rows` rounds them."""
    w13, w2 = meant

    def rounded(rows: Tensor) -> Tensor:
        elements, scales = quantize_rows(rows, element)
        return elements.double() * scales.double()[:, None]

    inputs, out = rounded(x), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, pairs in enumerate(
        zip(*choose_experts(logits, ExpertChoice(top_k, renormalize=renormalize)), strict=True)
    ):
        for probability, expert in zip(*pairs, strict=True):
            gate, up = (w13[expert] @ inputs[token]).chunk(2)
            activated = torch.nn.functional.silu(gate) * up
            out[token] += probability * (w2[expert] @ rounded(activated.to(x.dtype)[None])[0])
    return out


def test_stacks_refuse_activations_beside_silu() -> None:
    options = {"device": torch.device("cpu")}
    w13 = GroupQuantizedExperts(2, 64, 32, torch.float32, FORMATS[0], **options, gated=True)
    w2 = GroupQuantizedExperts(2, 32, 32, torch.float32, FORMATS[0], **options, gated=False)
    with pytest.raises(ValueError, match="with silu and without biases, not swiglu_oai"):
        fused_moe(
            torch.ones(3, 32), torch.ones(3, 2), w13, w2, choice=ExpertChoice(1), activation="swiglu_oai"
        )


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_bytes_mix_as_what_was_rounded(
    name: str, element: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    sizes, top_k = SIZES[name], SIZES[name][2]
    stacks, meant = channel_stacks(sizes, element, dtype, device)
    x, logits = inputs(sizes, dtype, device)
    with poisoned_allocations():
        out = fused_moe(x, logits, *stacks, choice=ExpertChoice(top_k, renormalize=top_k == 2))
    expected = mixed_in_8_bits(x, logits, meant, element, top_k, top_k == 2)
    # where a sum's last bit decides how an element between the products is rounded, it is off by a step
    step = {torch.int8: 2**-9, torch.float8_e4m3fn: 2**-6}[element]
    assert (out.double() - expected).norm() < (step + TOLERANCE[dtype]["rtol"]) * expected.norm()


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_a_token_of_two_experts_is_rounded_once(
    element: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded: list[tuple[int, ...]] = []

    def count(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rounded.append(tuple(rows.shape))
        return quantize_rows(rows, dtype)

    monkeypatch.setattr(w8a8_experts, "quantize_rows", count)
    sizes = SIZES["few rows"]
    stacks, _ = channel_stacks(sizes, element, torch.float32, device)
    fused_moe(*inputs(sizes, torch.float32, device), *stacks, choice=ExpertChoice(2))
    assert rounded == [(5, 64), (10, 32)]


KINDS = [FORMATS[0], *ELEMENTS]


def any_stacks(
    kind: QuantizedFormat | torch.dtype, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Stacks:
    create = group_stacks if isinstance(kind, QuantizedFormat) else channel_stacks
    stacks, _ = create(sizes, kind, dtype, device)
    return stacks


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_of_nan_shows_in_no_other_token(
    kind: QuantizedFormat | torch.dtype, device: torch.device
) -> None:
    sizes = (3, 2, 1, 32, 32)
    weights = any_stacks(kind, sizes, torch.float32, device)
    x, logits = inputs(sizes, torch.float32, device)
    clean = fused_moe(x, logits, *weights, choice=ExpertChoice(1))
    x[1, 7], logits[1] = torch.nan, torch.nan
    out = fused_moe(x, logits, *weights, choice=ExpertChoice(1))
    assert out[1].isnan().all()
    others = torch.tensor([0, 2], device=device)
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_experts_that_nobody_chose_have_no_say(
    kind: QuantizedFormat | torch.dtype, device: torch.device
) -> None:
    sizes = (3, 4, 2, 32, 32)
    weights = any_stacks(kind, sizes, torch.float32, device)
    x, _ = inputs(sizes, torch.float32, device)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device=device).expand(3, 4).contiguous()
    clean = fused_moe(x, logits, *weights, choice=ExpertChoice(2))
    for stack in weights:
        for expert in (0, 3):
            stack[expert].scales.fill_(torch.nan)
    assert torch.equal(fused_moe(x, logits, *weights, choice=ExpertChoice(2)), clean)


# the interpreter's tiles are numpy's products, whose order depends on their size: of groups in float32 it is one
@pytest.mark.parametrize("kind", [*FORMATS, *ELEMENTS] if torch.cuda.is_available() else FORMATS[:1], ids=str)
def test_a_token_is_the_same_in_every_batch(
    kind: QuantizedFormat | torch.dtype, device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (300, 4, 2, 352, 160) if device.type == "cuda" else (12, 4, 2, 64, 32)
    weights = any_stacks(kind, sizes, dtype, device)
    x, logits = inputs(sizes, dtype, device)
    together = fused_moe(x, logits, *weights, choice=ExpertChoice(2))
    for first, last in ((0, 1), (3, 9), (10, len(x))):
        some = fused_moe(x[first:last], logits[first:last], *weights, choice=ExpertChoice(2))
        assert torch.equal(some, together[first:last])


def test_inputs_may_be_views(device: torch.device) -> None:
    sizes = SIZES["few rows"]
    x, logits = inputs(sizes, torch.float32, device)
    wide_x, wide_logits = x.new_full((5, 70), torch.nan), logits.new_full((5, 11), 99.0)
    wide_x[:, 3:67], wide_logits[:, 2:10] = x, logits
    for kind in (FORMATS[0], torch.int8):
        weights = any_stacks(kind, sizes, torch.float32, device)
        out = fused_moe(wide_x[:, 3:67], wide_logits[:, 2:10], *weights, choice=ExpertChoice(2))
        assert torch.equal(out, fused_moe(x, logits, *weights, choice=ExpertChoice(2)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_tokens_give_no_rows(kind: QuantizedFormat | torch.dtype, device: torch.device) -> None:
    sizes = (0, 4, 2, 64, 32)
    given = *inputs(sizes, torch.float32, device), *any_stacks(kind, sizes, torch.float32, device)
    assert fused_moe(*given, choice=ExpertChoice(2)).shape == (0, 64)


def test_experts_share_one_piece_of_memory(device: torch.device) -> None:
    stack = GroupQuantizedExperts(3, 8, 64, torch.float32, FORMATS[0], device=device)
    stack[1].fill_rows(2, torch.randn(4, 64))
    assert stack.storage.integers[1].any()
    assert not stack.storage.integers[[0, 2]].any()
    assert sum(weight.num_bytes for weight in stack) == 3 * 8 * 64 * 5 // 8
    assert sum(part.nbytes for part in (stack.storage.integers, stack.storage.scales)) == 3 * 8 * 64 * 9 // 16


def test_stacks_that_do_not_fit_are_named(device: torch.device) -> None:
    sizes = (3, 4, 2, 64, 32)
    x, logits = inputs(sizes, torch.float32, device)
    (w13, w2), _ = group_stacks(sizes, FORMATS[0], torch.float32, device)
    with pytest.raises(ValueError, match=r"w13 \[3, 64, 64\] and w2 \[4, 64, 32\] must be"):
        fused_moe(x, logits, w13[:3], w2, choice=ExpertChoice(2))
    with pytest.raises(ValueError, match=r"w13 \[4, 64, 64\] must be .* for inputs in torch.float16"):
        fused_moe(x.half(), logits, w13, w2, choice=ExpertChoice(2))
