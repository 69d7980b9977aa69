"""Recorded programs: the same numbers as calls one by one, for every number of rows, and no silent gaps."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_kernels.ops import embedding, gated_linear, gather_rows, linear, rms_norm
from triptych_kernels.weights.packed import PackedWeight

pytestmark = pytest.mark.usefixtures("each_isa")

MAX_ROWS, HIDDEN, INNER, VOCAB = 20, 24, 40, 50


class Network:
    """Some layers with a residual, so that buffers live for different times."""

    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(1)
        self.table = packed(VOCAB, HIDDEN)
        self.layers = [
            (torch.rand(HIDDEN), packed(2 * INNER, HIDDEN, gated=True), packed(HIDDEN, INNER))
            for _ in range(num_layers)
        ]

    def __call__(self, token_ids: Tensor, chosen: Tensor) -> Tensor:
        residual, hidden = embedding(token_ids, self.table), None
        for norm, up, down in self.layers:
            if hidden is None:
                normed = rms_norm(residual, norm, 1e-5)
            else:
                normed, residual = rms_norm(hidden, norm, 1e-5, residual)
            hidden = linear(gated_linear(normed, up), down)
        return linear(gather_rows(hidden, chosen), self.table)


def packed(out_features: int, in_features: int, gated: bool = False) -> PackedWeight:
    weight = PackedWeight(out_features, in_features, torch.float32, gated=gated)
    for half in ("gate", "up") if gated else (None,):
        weight.fill_rows(0, torch.randn(out_features // (1 + gated), in_features), half)
    return weight


def test_a_program_computes_what_its_calls_compute_one_by_one() -> None:
    network = Network(4)
    token_ids, chosen = torch.zeros(MAX_ROWS, dtype=torch.int64), torch.zeros(MAX_ROWS, dtype=torch.int64)

    def forward(recording: Recording) -> tuple[Tensor]:
        logits = network(recording.input(token_ids, count="tokens"), recording.input(chosen, count="chosen"))
        return (logits,)

    program = record(forward)
    for num_tokens, num_chosen in ((20, 20), (1, 1), (13, 2), (3, 0), (20, 7)):
        token_ids[:num_tokens] = torch.randint(VOCAB, (num_tokens,))
        chosen[:num_chosen] = torch.randint(num_tokens, (num_chosen,))
        program.run({"tokens": num_tokens, "chosen": num_chosen})
        expected = network(token_ids[:num_tokens], chosen[:num_chosen])
        assert torch.equal(program.outputs[0][:num_chosen], expected)


def test_every_output_stays_until_the_next_run() -> None:
    memory, norm = torch.randn(4, 64), torch.ones(64)

    def forward(recording: Recording) -> list[Tensor]:
        outputs = [recording.input(memory, count="rows")]
        for _ in range(4):
            outputs.append(rms_norm(outputs[-1], norm, 1e-5))
        return outputs[1:3]

    program = record(forward)
    program.run({"rows": 4})
    first = rms_norm(memory, norm, 1e-5)
    for output, expected in zip(program.outputs, (first, rms_norm(first, norm, 1e-5)), strict=True):
        assert torch.equal(output, expected)


def test_buffers_with_disjoint_lifetimes_share_memory() -> None:
    def num_bytes(num_layers: int) -> int:
        network, token_ids = Network(num_layers), torch.zeros(MAX_ROWS, dtype=torch.int64)

        def forward(recording: Recording) -> tuple[Tensor]:
            tokens = recording.input(token_ids, count="tokens")
            return (network(tokens, tokens),)

        return record(forward).num_bytes

    assert num_bytes(12) == num_bytes(4)


def test_what_torch_would_compute_by_itself_is_refused_by_name() -> None:
    memory, norm = torch.zeros(4, 6), torch.ones(6)

    def forward(recording: Recording) -> tuple[Tensor]:
        x = recording.input(memory, count="rows")
        return (torch.fft.fft(rms_norm(x, norm, 1e-5)),)

    with pytest.raises(NotRecordable, match="aten::_fft_r2c has no native kernel"):
        record(forward)


def test_rows_that_nobody_counts_are_refused() -> None:
    norm = torch.ones(6)

    def forward(recording: Recording) -> tuple[Tensor]:
        return (rms_norm(torch.empty(4, 6, device="meta"), norm, 1e-5),)

    with pytest.raises(NotRecordable, match="rms_norm: its rows come from outside"):
        record(forward)


def test_tensors_without_memory_are_for_recordings_alone() -> None:
    with pytest.raises(RuntimeError, match="gather_rows: tensors on the meta device"):
        launch("gather_rows", torch.empty(2, device="meta"))


def test_operands_must_be_the_fields_of_the_struct() -> None:
    x, rows = torch.randn(3, 4), torch.tensor([2, 0])
    operands = {"x": x, "rows": rows, "out": torch.empty(2, 4), "row_bytes": 16}
    launch("gather_rows", rows, **operands)
    assert torch.equal(operands["out"], x[rows])
    for wrong in ({"out": operands["out"]}, operands | {"size": 4}):
        with pytest.raises(
            TypeError, match=r"gather_rows: the operands .* are not the fields x, rows, out, row_bytes"
        ):
            launch("gather_rows", rows, **wrong)
    with pytest.raises(struct.error):
        launch("gather_rows", rows, **operands | {"row_bytes": 16.0})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_copy_that_is_called_a_view_is_recorded(mode: Callable[[], AbstractContextManager[None]]) -> None:
    memory, weight = torch.rand(4, 6), torch.ones(6)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        x = recording.input(memory, count="tokens")
        swapped = x.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6)  # cannot be a view
        return rms_norm(x, weight, 1e-6, swapped)

    with mode():
        program = record(forward)
        program.run({"tokens": 4})
        expected = memory + memory.view(4, 2, 3).transpose(1, 2).reshape(4, 6)
        torch.testing.assert_close(program.outputs[1], expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_views_of_every_kind_are_recorded(mode: Callable[[], AbstractContextManager[None]]) -> None:
    memory, weight = torch.rand(4, 12), torch.ones(6)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        x = recording.input(memory, count="tokens")
        left, right = x.split(6, dim=-1)
        return (rms_norm(left, weight, 1e-6), rms_norm(right.reshape(4, 6).unsqueeze(1), weight, 1e-6))

    with mode():
        program = record(forward)
        program.run({"tokens": 4})
        for output, part in zip(program.outputs, memory.split(6, dim=-1), strict=True):
            torch.testing.assert_close(output.view(4, 6), rms_norm(part.contiguous(), weight, 1e-6))


def test_an_operand_that_nothing_has_filled_is_refused_by_name() -> None:
    memory, weight = torch.rand(4, 6), torch.ones(6)

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        x = recording.input(memory, count="tokens")
        return rms_norm(x, weight, 1e-6, torch.empty(4, 6, device="meta"))

    with pytest.raises(NotRecordable, match="rms_norm: no recorded call has filled its operand residual"):
        record(forward)
