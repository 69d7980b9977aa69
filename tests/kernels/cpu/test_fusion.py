"""Calls joined to the call after them: the bits of separate calls, and no join where a row depends on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.fusion import StagedCall, fuse_calls
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import Program, record
from triptych_kernels.cpu.recording import Recording
from triptych_kernels.ops import (
    embedding,
    gated_linear,
    gather_rows,
    layer_norm,
    linear,
    paged_attention,
    rms_norm,
    rotary_and_write_kv,
)
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import QuantizedWeight

pytestmark = pytest.mark.usefixtures("each_isa")

MOST, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, BLOCK = 40, 96, 4, 2, 32, 160, 4
STEPS = ((1, (1,)), (3, (1, 1, 1)), (8, (1,) * 8), (17, (1, 11, 5)), (40, (33, 7)))
"""Tokens of a step, and of each sequence of it."""


def new_weight(kind: str, out_features: int, in_features: int, *, gated: bool, bias: bool) -> LinearWeight:
    weight: PackedWeight
    if kind in ("float32", "bfloat16"):
        dtype = getattr(torch, kind)
        weight = PackedWeight(out_features, in_features, dtype, gated=gated, bias=bias)
    elif kind == "widened":
        weight = WidenedWeight(out_features, in_features, torch.bfloat16, gated=gated, bias=bias)
    else:
        weight = QuantizedWeight(
            out_features,
            in_features,
            torch.float32,
            format=QuantizedFormat(4, "minimum"),
            gated=gated,
            bias=bias,
        )
        weight.input_bits = 8 if kind == "bytes" else 16
        weight.wide_rows = 16 if kind == "wide" else weight.wide_rows
    rows = out_features // (1 + gated)
    for half in ("gate", "up") if gated else (None,):
        weight.fill_rows(0, torch.randn(rows, in_features) * in_features**-0.5, half)
        if bias:
            weight.fill_bias(0, torch.randn(rows), half)
    return weight


@dataclass
class Layer:
    """One layer of a decoder: what its family has is chosen by the arguments."""

    kind: str
    is_rms: bool = True
    has_bias: bool = False
    is_gated: bool = True
    norms_heads: bool = False
    is_parallel: bool = False
    """Whether attention and MLP read the same normalised rows."""
    weights: dict[str, LinearWeight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.dtype = torch.bfloat16 if self.kind == "bfloat16" else torch.float32
        sizes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False),
            "o": (HIDDEN, HEADS * HEAD_DIM, False),
            "up": (INNER * (1 + self.is_gated), HIDDEN, self.is_gated),
            "down": (HIDDEN, INNER, False),
        }
        for name, (outputs, inputs, gated) in sizes.items():
            self.weights[name] = new_weight(self.kind, outputs, inputs, gated=gated, bias=self.has_bias)
        self.norm_weights = torch.rand(2, HIDDEN) + 0.5
        self.head_norm = torch.rand(HEAD_DIM) + 0.5
        self.cos_sin = torch.randn(MOST, HEAD_DIM)

    def normalise(self, number: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.norm_weights[number]
        if self.is_rms:
            return rms_norm(x, weight, 1e-5, residual, out_dtype=self.dtype)
        bias = weight - 1 if self.has_bias else None
        return layer_norm(x, weight, bias, 1e-5, residual, out_dtype=self.dtype)

    def __call__(self, step: Step, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normalised, residual = self.normalise(0, hidden, residual)
        packed = linear(normalised, self.weights["qkv"]).unflatten(1, (-1, HEAD_DIM))
        query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if self.norms_heads:
            query, key = (rms_norm(x, self.head_norm, 1e-5, out_dtype=self.dtype) for x in (query, key))
        query = rotary_and_write_kv(
            query, key, value, step.positions, self.cos_sin, step.cache, step.slots, kv_scales=step.scales
        )
        lens, starts = step.seq_lens, step.query_starts
        attended = paged_attention(
            query, step.cache, step.block_tables, starts, lens, AttendOptions(0.2), kv_scales=step.scales
        )
        hidden = linear(attended.flatten(1), self.weights["o"])
        if not self.is_parallel:
            normalised, residual = self.normalise(1, hidden, residual)
        up = self.weights["up"]
        inner = (
            gated_linear(normalised, up)
            if self.is_gated
            else linear(normalised, up, activation="gelu", out_dtype=self.dtype)
        )
        return linear(inner, self.weights["down"]), residual


class Step:
    """The inputs of a step, or stand-ins for them."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        self.hidden, self.residual = torch.randn(MOST, HIDDEN).to(dtype), torch.randn(MOST, HIDDEN)
        self.positions, self.slots = (torch.zeros(MOST, dtype=torch.int64) for _ in range(2))
        self.block_tables = torch.zeros(MOST, MOST // BLOCK, dtype=torch.int32)
        self.query_starts = torch.zeros(MOST + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(MOST, dtype=torch.int32)
        shape = (8 * MOST // BLOCK, 2, KV_HEADS, BLOCK, HEAD_DIM)
        self.cache = torch.zeros(shape, dtype=cache_dtype)
        self.scales = torch.zeros(shape[:-1]) if cache_dtype == torch.int8 else None

    def fill(self, query_lens: tuple[int, ...]) -> None:
        """Make sequences of these numbers of new tokens, which begin a cache of their own."""
        self.block_tables[: len(query_lens)] = torch.arange(len(query_lens) * (MOST // BLOCK)).view(
            -1, MOST // BLOCK
        )
        ends = torch.tensor(query_lens).cumsum(0)
        self.query_starts[: len(ends) + 1] = torch.tensor((0, *ends))
        self.seq_lens[: len(ends)] = torch.tensor(query_lens)
        for sequence, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
            self.positions[first:end] = torch.arange(end - first)
            self.slots[first:end] = sequence * MOST + self.positions[first:end]

    def view(self, take: Callable[[Tensor, str], Tensor]) -> Step:
        other = object.__new__(Step)
        counts = {"block_tables": "rows", "query_starts": "starts", "seq_lens": "rows"}
        for name, tensor in vars(self).items():
            is_kept = name in ("cache", "scales")
            setattr(other, name, tensor if is_kept else take(tensor, counts.get(name, "tokens")))
        return other


def assert_same_bits(layer: Layer, *, cache_dtype: torch.dtype) -> Program:
    step = Step(layer.dtype, cache_dtype)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        inputs = step.view(
            lambda memory, count: recording.input(memory, count=count.replace("starts", "rows"))
        )
        return layer(inputs, inputs.hidden, inputs.residual)

    program = record(forward)
    for num_threads in (1, 2):
        use_threads(num_threads)
        for num_tokens, query_lens in STEPS:
            step.fill(query_lens)
            counts = {"tokens": num_tokens, "rows": len(query_lens)}
            sizes = {**counts, "starts": len(query_lens) + 1}
            sliced = step.view(lambda memory, count, sizes=sizes: memory[: sizes[count]])
            step.cache.zero_()
            expected = layer(sliced, sliced.hidden, sliced.residual)
            cache = step.cache.clone()
            step.cache.zero_()
            program.run(counts)
            assert torch.equal(step.cache, cache)
            for output, own in zip(program.outputs, expected, strict=True):
                assert own.isfinite().all()
                assert torch.equal(output[:num_tokens], own), (num_threads, num_tokens)
    return program


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "widened", "quantized", "bytes", "wide"])
def test_a_fused_layer_has_the_bits_of_separate_calls(kind: str) -> None:
    program = assert_same_bits(Layer(kind), cache_dtype=torch.float32)
    assert len(program) == 5  # of 9: norm and qkv, rotary, cache and attention, o, norm and up, down


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        ({"is_rms": False, "has_bias": True, "is_gated": False}, 5),
        ({"has_bias": True, "norms_heads": True}, 5),
        ({"is_rms": False, "is_parallel": True}, 5),
    ],
    ids=["LayerNorm, biases, plain MLP", "norms of heads", "one norm for both"],
)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_families_have_the_bits_of_separate_calls(
    layer: dict[str, bool], calls: int, cache_dtype: torch.dtype
) -> None:
    assert len(assert_same_bits(Layer("bytes", **layer), cache_dtype=cache_dtype)) == calls


def fused(forward: Callable[[Recording], Tensor]) -> list[tuple[str, ...]]:
    """Return the kernels of each call of a recording, the stages first."""
    calls: list[StagedCall] = []

    def record_only(recorded: Recording) -> tuple[Tensor]:
        out = forward(recorded)
        calls.extend(fuse_calls(recorded.calls, recorded.buffers))
        return (out,)

    record(record_only)
    return [tuple(call.kernel for call in (*each.stages, each.call)) for each in calls]


def test_rows_of_another_number_are_not_made() -> None:
    """A product of chosen rows cannot make the rows that they are chosen from."""
    norm, weight = torch.ones(HIDDEN), new_weight("float32", 8, HIDDEN, gated=False, bias=False)
    x, chosen = torch.zeros(MOST, HIDDEN), torch.zeros(MOST, dtype=torch.int64)

    def forward(recording: Recording) -> Tensor:
        tokens, rows = recording.input(x, count="tokens"), recording.input(chosen, count="rows")
        normalised = rms_norm(tokens, norm, 1e-5)
        return linear(rms_norm(gather_rows(normalised, rows), norm, 1e-5), weight)

    assert fused(forward) == [("rms_norm",), ("gather_rows",), ("rms_norm", "linear")]

    def forward_directly(recording: Recording) -> Tensor:
        tokens, rows = recording.input(x, count="tokens"), recording.input(x, count="rows")
        rms_norm(tokens, norm, 1e-5)
        return linear(rows, weight)

    assert fused(forward_directly) == [("rms_norm",), ("linear",)]


def test_kernels_that_read_other_rows_are_no_stages() -> None:
    """Gathered rows may be any of those before, even where there are as many."""
    norm, weight = torch.ones(HIDDEN), new_weight("float32", 8, HIDDEN, gated=False, bias=False)
    x, chosen = torch.randn(MOST, HIDDEN), torch.arange(MOST).flip(0)

    def forward(recording: Recording) -> Tensor:
        tokens, rows = recording.input(x, count="tokens"), recording.input(chosen, count="tokens")
        return linear(gather_rows(rms_norm(tokens, norm, 1e-5), rows), weight)

    assert fused(forward) == [("rms_norm",), ("gather_rows",), ("linear",)]


def test_calls_that_nothing_reads_row_by_row_stay_calls() -> None:
    norm, table = torch.ones(HIDDEN), torch.zeros(9, HIDDEN)
    ids = torch.zeros(MOST, dtype=torch.int64)

    def forward(recording: Recording) -> Tensor:
        tokens = recording.input(ids, count="tokens")
        return rms_norm(rms_norm(embedding(tokens, table), norm, 1e-5), norm, 1e-5)

    assert fused(forward) == [("embedding",), ("rms_norm",), ("rms_norm",)]


def test_operations_of_torch_are_stages() -> None:
    norm, weight = torch.ones(HIDDEN), new_weight("float32", 8, HIDDEN, gated=False, bias=False)
    x = torch.randn(MOST, HIDDEN)

    def forward(recording: Recording) -> tuple[Tensor]:
        tokens = recording.input(x, count="tokens")
        return (linear(rms_norm(torch.relu(tokens) * 2 + tokens.softmax(1), norm, 1e-5), weight),)

    program = record(forward)
    assert len(program) == 1
    for num_tokens in (1, 5, 13, 40):
        program.run({"tokens": num_tokens})
        own = x[:num_tokens]
        inner = torch.relu(own) * 2 + own.softmax(1)
        expected = linear(rms_norm(inner, norm, 1e-5), weight)
        torch.testing.assert_close(program.outputs[0][:num_tokens], expected, rtol=1e-4, atol=1e-5)
        alone = program.outputs[0][:num_tokens].clone()
        program.run({"tokens": 40})
        assert torch.equal(program.outputs[0][:num_tokens], alone)


def assert_recorded_bits(forward: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> Program:
    """Compare a recorded function with its operations called one by one, for several numbers of rows."""
    program = record(lambda recording: forward(recording.input(x, count="tokens")))
    for num_tokens in (1, 13, 40):
        program.run({"tokens": num_tokens})
        for found, expected in zip(program.outputs, forward(x[:num_tokens].clone()), strict=True):
            assert torch.equal(found[:num_tokens], expected)
    return program


def kernels_of(program: Program) -> list[str]:
    return [
        name for call in program.calls for name in (*(stage.kernel for stage in call.stages), call.kernel)
    ]


@pytest.mark.parametrize("size", [HIDDEN, 37])
@pytest.mark.parametrize("is_rms", [True, False], ids=["RMSNorm", "LayerNorm"])
def test_norms_read_residuals_as_they_were_before_they_were_widened(is_rms: bool, size: int) -> None:
    """A model that normalises sums keeps the bits of float32 without float32 in memory."""
    torch.manual_seed(0)
    x, other, weight = torch.randn(MOST, size).bfloat16(), torch.randn(size), torch.rand(size) + 0.5

    def normalise(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if is_rms:
            return rms_norm(x, weight, 1e-5, residual, out_dtype=torch.bfloat16)
        return layer_norm(x, weight, other, 1e-5, residual, out_dtype=torch.bfloat16)

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        first, _ = normalise(x * 2, x.float())
        return (normalise(first, first.float())[0],)

    kernel = "rms_norm" if is_rms else "layer_norm"
    assert kernels_of(assert_recorded_bits(layers, x)) == ["pointwise", kernel, kernel]

    def widened_and_sum_are_read(x: Tensor) -> tuple[Tensor, ...]:
        residual = (x * 2).float()
        return (*normalise(x, residual), residual)

    assert kernels_of(assert_recorded_bits(widened_and_sum_are_read, x)) == ["pointwise", kernel]

    def changed_after_it_was_widened(x: Tensor) -> tuple[Tensor, ...]:
        hidden = x + 1
        residual = hidden.float()
        normalised, _ = normalise(x, residual)
        hidden.copy_(normalised)
        return (hidden, normalise(x, residual)[0])

    assert_recorded_bits(changed_after_it_was_widened, x)
