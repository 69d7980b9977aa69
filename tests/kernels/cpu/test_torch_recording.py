"""Recordings of torch: rows stay apart, constants stay in memory, and anything else is refused by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.kernels.cpu.recorded import MODES, TOKENS, Mode, assert_recorded, record_function, widest_isa
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_kernels.ops import gather_rows, linear, rms_norm
from triptych_kernels.weights.packed import PackedWeight

__all__ = ["widest_isa"]
pytestmark = pytest.mark.usefixtures("widest_isa")
SIZE = 6
REFUSED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "convolution": lambda x: functional.conv1d(x.transpose(1, 2), torch.ones(SIZE, 1, 3), groups=SIZE),
    "_softmax mixes": lambda x: x.softmax(1),
    "_softmax mixes tokens": lambda x: x.transpose(1, 2).softmax(-1),
    "mean.dim mixes": lambda x: x - x.mean(1, keepdim=True),
    "mean": lambda x: x - x.mean(),
    "sum mixes tokens": lambda x: x * x[0, :, 0].sum(),
    "sum.dim_IntList mixes": lambda x: x + x.sum((1, 2), keepdim=True),
    "amax": lambda x: x - x.amax(1, keepdim=True),
    "max": lambda x: x / x.max(),
    "linalg_vector_norm": lambda x: x / torch.linalg.vector_norm(x),
    "layer_norm": lambda x: functional.layer_norm(x.transpose(1, 2), (x.shape[1],)),
    "cat mixes": lambda x: torch.cat((x, x), 1),
    "cat mixes ": lambda x: torch.cat((x[:, 1:], x[:, :1]), 1),
    "constant_pad_nd": lambda x: functional.pad(x, (0, 0, 1, 0)),
    "constant_pad_nd ": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "bmm": lambda x: x @ x.transpose(1, 2),
    "bmm ": lambda x: torch.ones(1, SIZE, 4) @ x.transpose(1, 2)[:, :4],
    "mul.Tensor mixes tokens": lambda x: x[..., :1] * x[..., :1].transpose(1, 2),
    "add.Tensor mixes tokens": lambda x: x + x[:, :1],
    "add.Tensor mixes tokens ": lambda x: x[:, 1:] + x[:, :-1],
    "copy_ mixes tokens": lambda x: x.clone()[:, 1:].copy_(x[:, :-1]),
    "copy_ mixes": lambda x: torch.empty(1, SIZE, x.shape[1], device=x.device).copy_(x.transpose(1, 2)),
    "mul.Tensor mixes": lambda x: x.view(1, -1, 2 * x.shape[1]) * 2,
    "index.Tensor": lambda x: x[:, torch.tensor([1, 0, 2])],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "add.Tensor: a constant has values of its own": lambda x: x + torch.arange(x.shape[1])[:, None],
    "add.Tensor: a constant has values of its own ": lambda x: (
        x + torch.eye(x.shape[1], device=x.device)[:, :1]
    ),
    "mul.Tensor depends": lambda x: x * x.shape[1],
    "div.Tensor depends": lambda x: x / torch.tensor(float(x.shape[1])),
    "add.Tensor depends": lambda x: x + torch.arange(x.shape[1] + 1)[-1],
    "mul.Tensor depends ": lambda x: x * torch.rand(SIZE),
    "neg depends": lambda x: (-x if x.shape[1] > 4 else x) * 1,
    "whether aten::mul.Tensor": lambda x: -x if x.shape[1] > 4 else -x * 2,
    "neg depends ": lambda x: (-x if x.shape[1] > 4 else x + 1) * 1,
    "_local_scalar_dense": lambda x: x * float(x[0, 0, 0]),
    "mul.Tensor mixes  ": lambda x: x.unfold(1, 2, 1) * 1,
    "mul.Tensor mixes   ": lambda x: x.as_strided((1, x.shape[1], 2 * SIZE), (0, SIZE, 1)) * 1,
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(-1).values,
    "scatter": lambda x: x.scatter(-1, torch.zeros(1, 1, 1, dtype=torch.int64).expand(1, x.shape[1], 1), 0.0),
    "fill_ writes into a constant|copy_ writes into a constant": lambda x: torch.zeros(
        x.shape, device=x.device
    ).copy_(x),
    "bitwise_and": lambda x: x.long() & 1,
    "floor_divide": lambda x: x.long() // 2,
    "_to_copy: no native kernel computes with torch.float64": lambda x: x.double() + 1,
    "no recorded call has filled": lambda x: x + torch.empty_like(x),
    "no recorded call has filled ": lambda x: torch.empty_like(x).add_(x),
}
"""A part of the message -> what is refused with it."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, mode: Mode) -> None:
    with mode(), pytest.raises(NotRecordable, match=name.strip()):
        record_function(REFUSED[name], torch.randn(TOKENS, SIZE))


def test_sizes_equal_to_the_number_of_tokens() -> None:
    x = torch.randn(6, 6)
    for count in (5, 6, 7):  # of rows while it is recorded, too
        y = torch.randn(6, count)
        weight = torch.randn(count)
        assert_recorded(lambda y, w=weight: (y * w).softmax(-1), y)
    with pytest.raises(NotRecordable, match="mixes tokens"):
        record_function(lambda x: x.transpose(1, 2).softmax(-1), x)


def test_a_view_that_fits_only_the_recorded_length_is_refused() -> None:
    for size in (3, 7, 8):
        with pytest.raises(NotRecordable):
            record_function(lambda x: x.view(1, -1, x.shape[1]) * 2, torch.randn(7, size))


@pytest.mark.parametrize("mode", MODES)
def test_rows_merged_with_an_axis(mode: Mode) -> None:
    x, weight = torch.randn(TOKENS, 3, 8), torch.randn(8)

    def function(x: Tensor) -> Tensor:
        assert x.repeat_interleave(2, 1).shape[1] == 2 * x.shape[1]
        flat = x.view(-1, 8)  # [tokens * 3, 8]
        normed = functional.rms_norm(flat * 2, (8,), weight, 1e-5)
        return torch.cat((normed, flat), -1).view(1, -1, 3, 16)

    with mode():
        assert_recorded(function, x)


@pytest.mark.parametrize("mode", MODES)
def test_constants_that_are_moved_to_the_device_stay_known(mode: Mode) -> None:
    table = torch.randn(SIZE)

    def function(x: Tensor) -> Tensor:
        moved = table.to(x.device).to(x) * 2
        scale = torch.full((), 0.5, device=x.device) * torch.tensor(3.0, device=x.device)
        scale = scale + torch.tensor([1.0] * SIZE, device=x.device)
        return x * moved.to(x.dtype) + scale + table[None].expand(2, -1).to(device=x.device)[1]

    with mode():
        assert_recorded(function, torch.randn(TOKENS, SIZE))


@pytest.mark.parametrize("mode", MODES)
def test_hidden_copies_are_recorded(mode: Mode) -> None:
    def function(x: Tensor) -> Tensor:
        return x + x.view(*x.shape[:2], 2, 3).transpose(2, 3).reshape(x.shape)

    with mode():
        assert_recorded(function, torch.randn(TOKENS, SIZE))


STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a * b,
    lambda a, b: a - 0.5 * b,
    lambda a, b: a.tanh(),
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(0.5).sub_(b),
    lambda a, b: torch.cat((-b[..., 3:], a[..., :3]), -1),
    lambda a, b: a[..., :3].copy_(b[..., 3:]),
    lambda a, b: a[..., 1:4].mul_(b[..., :1]),
    lambda a, b: a[..., ::2].add_(1),
    lambda a, b: a.softmax(-1),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a * b.mean(-1, keepdim=True),
    lambda a, b: a.transpose(1, 2).clone().transpose(1, 2),
)


@settings(deadline=None, max_examples=80)
@given(
    picks=st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 5), st.integers(0, 5)),
        min_size=2,
        max_size=30,
    )
)
def test_chains_keep_the_order_of_what_they_compute(picks: list[tuple[int, int, int]]) -> None:
    def function(x: Tensor) -> Tensor:
        tensors = [x * 1, x + 1]
        for step, a, b in picks:
            out = STEPS[step](tensors[a % len(tensors)], tensors[b % len(tensors)])
            if out.shape == x.shape:
                tensors.append(out)
        return torch.cat([tensor.clamp(-9, 9) for tensor in tensors[-6:]], -1)

    assert_recorded(
        function, torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)), rtol=1e-4, atol=1e-4
    )


def test_operations_on_the_same_elements_are_one_call() -> None:
    x = torch.randn(TOKENS, SIZE)
    assert len(assert_recorded(lambda x: functional.gelu(x * 2 + 1, approximate="tanh") * x, x)) == 1
    weight = PackedWeight(SIZE, SIZE, torch.float32)
    weight.fill_rows(0, torch.randn(SIZE, SIZE))

    def gated(x: Tensor) -> Tensor:
        gate = functional.silu(x)
        up = linear(x[0], weight)
        assert isinstance(up, Tensor)
        return gate * up

    assert len(assert_recorded(gated, x)) == 2


def test_counts_of_their_own() -> None:
    tokens, chosen = torch.randn(TOKENS, SIZE), torch.zeros(1, dtype=torch.int64)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        x = recording.input(tokens, count="tokens")
        rows = gather_rows(x * 2, recording.input(chosen, count="samples"))
        return (torch.tanh(rows / 30) * 30,)

    program = record(forward)
    assert program.outputs[0].shape == (1, SIZE)
    for last in (0, 3, 6):
        chosen[0] = last
        program.run({"tokens": last + 1, "samples": 1})
        torch.testing.assert_close(program.outputs[0][0], torch.tanh(tokens[last] * 2 / 30) * 30)

    def mixed(recording: Recording) -> tuple[Tensor, ...]:
        return (recording.input(tokens, count="tokens") + recording.input(tokens, count="samples"),)

    with pytest.raises(NotRecordable, match="Tensor mixes samples with tokens"):
        record(mixed)


def test_native_ops_between_torchs() -> None:
    weight, norm = PackedWeight(8, SIZE, torch.float32), torch.rand(SIZE)
    weight.fill_rows(0, torch.randn(8, SIZE))
    x = torch.randn(TOKENS, SIZE)

    def function(x: Tensor) -> Tensor:
        hidden = rms_norm((x * 2)[0], norm, 1e-5)
        out = linear(hidden + 1, weight)
        assert isinstance(out, Tensor)
        return functional.gelu(out)[None]

    assert_recorded(function, x)
    with pytest.raises(NotRecordable, match="rms_norm"):
        record_function(lambda x: rms_norm(x * 2, norm, 1e-5), x)  # one row of all tokens
    with pytest.raises(NotRecordable, match="rms_norm"):
        record_function(lambda x: rms_norm((x * 2)[0, 1:], norm, 1e-5)[None], x)


def test_recording_does_not_import_torchs_compiler() -> None:
    code = """if True:
        import sys, torch
        from triptych_kernels.cpu.program import record
        def forward(recording):
            x = recording.input(torch.ones(4, 6), count="tokens")
            y = torch.nn.functional.silu(x.view(-1, 2, 3).transpose(0, 1).float() * 2.0).softmax(-1)
            y = torch.cat((y, torch.where(y > 0, y, 0.0)), -1).transpose(0, 1).reshape(-1, 12)
            return (torch.nn.functional.layer_norm(y @ torch.ones(12, 5), (5,)).mean(-1),)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                record(forward)
        assert not {"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_native_models_are_recorded_once() -> None:
    calls, memory, norm = [], torch.randn(4, SIZE), torch.rand(SIZE)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        calls.append(recording)
        out = rms_norm(recording.input(memory, count="tokens"), norm, 1e-5)
        assert isinstance(out, Tensor)
        return (out,)

    record(forward)
    assert len(calls) == 1
