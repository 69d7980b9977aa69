"""The native mixture of experts with every form of packed weights, against products of one expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.weights.coded_rows import random_rows
from triptych_kernels.cpu.library import expert_counts, forced_isa, usable_isas, use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe
from triptych_kernels.torch.moe import choose_experts
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import PANEL_FORMATS, QuantizedFormat
from triptych_kernels.weights.packed import PackedStack, PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import QuantizedWeight

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no native kernels are built for this processor")

NUM_EXPERTS, HIDDEN, INNER = 6, 96, 160  # no whole panels of the widest vectors
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Form:
    """A form of weights, and the dtype of its inputs."""

    name: str
    dtype: torch.dtype
    stored_dtype: torch.dtype | None = None
    format: QuantizedFormat | None = None
    input_bits: int = 16
    wide_rows: int = 0
    wide_bits: int = 16

    def create(self, out_features: int, in_features: int, *, gated: bool, bias: bool) -> PackedWeight:
        options = {"gated": gated, "bias": bias}
        if self.stored_dtype is not None:
            return WidenedWeight(out_features, in_features, self.stored_dtype, **options)
        if self.format is None:
            return PackedWeight(out_features, in_features, self.dtype, **options)
        kind = QuantizedWeight if self.format in PANEL_FORMATS else CodedWeight
        weight = kind(out_features, in_features, self.dtype, self.format, **options)
        weight.input_bits = 8 if self.input_bits == 8 else 16
        if self.wide_rows:
            weight.wide_rows, weight.wide_bits = self.wide_rows, 8 if self.wide_bits == 8 else 16
        return weight


Q4, Q4_AFFINE = QuantizedFormat(4), QuantizedFormat(4, "minimum")
Q8, Q8_AFFINE = QuantizedFormat(8), QuantizedFormat(8, "minimum")
ZERO_POINTS = QuantizedFormat(4, "zero")
NF4 = QuantizedFormat(4, "none", 32, "nf4", "float32")
FORMS = (
    Form("float32", FLOAT32),
    Form("bfloat16", BFLOAT16),
    Form("bfloat16 by float32", FLOAT32, stored_dtype=BFLOAT16),
    Form("float16 by float32", FLOAT32, stored_dtype=torch.float16),
    Form("q4", BFLOAT16, format=Q4),
    Form("q4 affine", FLOAT32, format=Q4_AFFINE),
    Form("q8", FLOAT32, format=Q8),
    Form("q8 affine", BFLOAT16, format=Q8_AFFINE),
    Form("q4 affine, inputs of 8 bits", BFLOAT16, format=Q4_AFFINE, input_bits=8),
    Form("q8, inputs of 8 bits", FLOAT32, format=Q8, input_bits=8),
    Form("zero points", FLOAT32, format=ZERO_POINTS),
    Form("zero points, inputs of 8 bits", BFLOAT16, format=ZERO_POINTS, input_bits=8),
    Form("nf4", FLOAT32, format=NF4),
)
WIDE = (
    Form("q4 wide", BFLOAT16, format=Q4_AFFINE, wide_rows=7),
    Form("nf4 wide", BFLOAT16, format=NF4, wide_rows=7),
    Form("q4 wide in bytes", BFLOAT16, format=Q4_AFFINE, input_bits=8, wide_rows=7, wide_bits=8),
)


@pytest.fixture(params=usable_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        use_threads(2)
        yield request.param
        use_threads(1)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacks(form: Form, *, bias: bool = False, has_gate: bool = True) -> tuple[PackedStack, PackedStack]:
    found = []
    up_rows = (1 + has_gate) * INNER
    for out_features, in_features, gated in ((up_rows, HIDDEN, has_gate), (HIDDEN, INNER, False)):
        stack = PackedStack(
            [form.create(out_features, in_features, gated=gated, bias=bias) for _ in range(NUM_EXPERTS)]
        )
        for expert, weight in enumerate(stack):
            size = INNER if in_features == HIDDEN else HIDDEN
            for index, half in enumerate(("gate", "up") if gated else (None,)):
                seed = 100 * expert + 10 * index + gated
                if isinstance(weight, CodedWeight):
                    rows = random_rows(weight.format, size, in_features, seed)
                    weight.fill_codes(0, replace(rows, scales=rows.scales / 64), half)
                else:
                    weight.fill_rows(0, normal(size, in_features, seed=seed) * in_features**-0.5, half)
                if bias:
                    weight.fill_bias(0, normal(size, seed=seed + 1), half)
        found.append(stack)
    return found[0], found[1]


def one_by_one(
    x: Tensor, logits: Tensor, w13: PackedStack, w2: PackedStack, choice: ExpertChoice, activation: str
) -> Tensor:
    """Each expert's products with the rows that choose it."""
    weights, experts = choose_experts(logits, choice)
    out = torch.zeros(x.shape)
    for rank in range(choice.top_k):
        for expert in range(NUM_EXPERTS):
            rows = (experts == expert).any(dim=1)  # all of them together, as many as the mixture has
            if rows.any():
                activated = w13[expert].multiply(x[rows].contiguous(), x.dtype, activation)
                results = torch.zeros(x.shape)
                results[rows] = w2[expert].multiply(activated, torch.float32)
                mine = experts[:, rank] == expert
                out[mine] += weights[mine, rank, None] * results[mine]
    return out.to(x.dtype)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("form", [*FORMS, *WIDE], ids=lambda form: form.name)
def test_experts_compute_as_products_of_their_own(form: Form, activation: str) -> None:
    w13, w2 = stacks(form, bias=activation == "swiglu_oai", has_gate=activation != "relu2")
    choice = ExpertChoice(2, renormalize=False)
    tolerance = 2**-8 if form.dtype == BFLOAT16 else 1e-5
    for num_rows in (
        1,
        2,
        23,
        300,
    ):  # 300: of two experts nearly all rows, so that they have loops of their own
        x = normal(num_rows, HIDDEN, seed=num_rows).to(form.dtype)
        logits = normal(num_rows, NUM_EXPERTS, seed=1)
        logits[:, 2] += 4.0
        expected = one_by_one(x, logits, w13, w2, choice, activation)
        found = fused_moe(x, logits, w13, w2, choice, activation=activation)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_row_has_the_same_bits_in_any_batch(form: Form) -> None:
    w13, w2 = stacks(form)
    x, logits = normal(300, HIDDEN, seed=1).to(form.dtype), normal(300, NUM_EXPERTS, seed=2)
    logits[:, 4] += 2.0
    whole = fused_moe(x, logits, w13, w2, ExpertChoice(3))
    for start, end in ((0, 1), (1, 3), (3, 20), (20, 90), (90, 299), (299, 300)):
        part = fused_moe(x[start:end], logits[start:end], w13, w2, ExpertChoice(3))
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5]], ids=lambda form: form.name)
def test_a_recorded_mixture_serves_any_choice(form: Form) -> None:
    w13, w2 = stacks(form)
    choice = ExpertChoice(2)
    x, logits = torch.zeros(40, HIDDEN, dtype=form.dtype), torch.zeros(40, NUM_EXPERTS)
    program = record(
        lambda recording: [
            fused_moe(
                recording.input(x, count="rows"), recording.input(logits, count="rows"), w13, w2, choice
            )
        ]
    )
    assert len(program) == 1
    for num_rows, seed in ((40, 1), (1, 2), (13, 3)):
        x[:num_rows] = normal(num_rows, HIDDEN, seed=seed)
        logits[:num_rows] = normal(num_rows, NUM_EXPERTS, seed=seed + 10)
        program.run({"rows": num_rows})
        expected = fused_moe(x[:num_rows], logits[:num_rows], w13, w2, choice)
        assert torch.equal(program.outputs[0][:num_rows], expected)


def test_many_rows_are_computed_in_parts() -> None:
    """More rows than one pass takes, in float32."""
    w13, w2 = stacks(FORMS[0])
    x, logits = normal(1100, HIDDEN, seed=1), normal(1100, NUM_EXPERTS, seed=2)
    whole = fused_moe(x, logits, w13, w2, ExpertChoice(1))
    assert torch.equal(whole[1000:], fused_moe(x[1000:], logits[1000:], w13, w2, ExpertChoice(1)))


def test_choices_are_counted_by_expert_and_of_the_busiest_rank() -> None:
    """More rows than one pass takes; then a rank that has two of the experts, of which the counts are of all."""
    w13, w2 = stacks(FORMS[0])
    x, logits = normal(1100, HIDDEN, seed=1), normal(1100, NUM_EXPERTS, seed=2)
    logits[:, 4] += 1.0  # the last rank has most
    layer, index = 200, torch.tensor([5, 0, 3, 1, 4, 2])
    choice = ExpertChoice(3, layer=layer)
    chosen = choose_experts(logits, choice)[1].flatten().bincount(minlength=NUM_EXPERTS)
    before = expert_counts()
    held = [PackedStack(list(weights)[:2]) for weights in (w13, w2)]
    fused_moe(x, logits, *held, replace(choice, layer=-1), first_expert=0)
    assert expert_counts() == before, "as of a layer that guesses"
    calls = (None, (w13, w2), choice), (0, held, choice), (0, held, replace(choice, weight_index=index))
    for num_calls, (first_expert, own, own_choice) in enumerate(calls, 1):
        fused_moe(x, logits, *own, own_choice, first_expert=first_expert)
        counts = expert_counts()
        assert counts.by_layer[layer] == (num_calls * chosen).tolist()
        assert {layer: counts.by_layer[layer]} | before.by_layer == counts.by_layer
    of_parts = [choose_experts(part, choice)[1].flatten() for part in logits.split(1024)]
    by_rank = [indices // 2 for experts in of_parts for indices in (experts, index[experts])]
    busiest = sum(int(ranks.bincount().max()) for ranks in by_rank)
    assert counts.of_busiest_ranks - before.of_busiest_ranks == busiest
    fewer = [PackedStack(list(weights)[:4]) for weights in (w13, w2)]
    fused_moe(x, logits[:, :4].contiguous(), *fewer, replace(choice, layer=layer + 1))
    assert len(expert_counts().by_layer[layer + 1]) == 4, "a layer has experts of its own number"
