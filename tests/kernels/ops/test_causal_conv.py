"""causal_conv against float64, and its bits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu.recorded import widest_isa  # noqa: F401 - a fixture
from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from tests.kernels.ops.recurrent import (
    Recurrence,
    assert_guesses_are_refused,
    assert_guesses_are_taken_back,
    assert_like_reference,
    assert_recorded,
    assert_same_bits_alone,
    assert_same_bits_however_cut,
    meta_rows,
    rows,
    small_rows,
)
from triptych_kernels.ops import causal_conv

case = cases_of("causal_conv")
implementation = implementations_of("causal_conv")


def recurrence(
    channels: int, taps: int = 4, *, bias: bool = True, activation: str | None = "silu"
) -> Recurrence:
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(taps, channels, generator=generator)
    biases = torch.randn(channels, generator=generator) if bias else None
    options = {"activation": activation}
    return Recurrence(
        causal_conv, (taps - 1, channels), [(channels,)], [weight, biases], options, num_kept=channels
    )


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("sizes", [(64, 4), (300, 4), (7, 3), (33, 2), (17, 6)], ids=str)
def test_convolves_like_the_reference(sizes: tuple[int, int], case: Case) -> None:
    assert_like_reference(recurrence(*sizes), case)


@pytest.mark.quick_cases(2)
def test_neither_bias_nor_activation_is_needed(case: Case) -> None:
    assert_like_reference(recurrence(40, 3, bias=False, activation=None), case)


@pytest.mark.quick_cases(2)
def test_cuts_give_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_however_cut(recurrence(70), implementation)


@pytest.mark.quick_cases(2)
def test_a_row_alone_has_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_alone(recurrence(70), implementation)


@pytest.mark.quick_cases(2)
def test_guesses_are_taken_back(implementation: Implementation) -> None:
    if implementation.isa:
        assert_guesses_are_taken_back(recurrence(70), implementation)


@pytest.mark.usefixtures("widest_isa")
def test_is_recorded() -> None:
    assert_recorded(recurrence(40))


def test_guesses_are_refused() -> None:
    assert_guesses_are_refused(recurrence(70))


def test_bad_operands_are_refused() -> None:
    x, weight, state = torch.zeros(3, 8), torch.zeros(4, 8), torch.zeros(5, 3, 8)
    batch = rows([3], [0], [1])
    with pytest.raises(ValueError, match="with two taps or more"):
        causal_conv(x, weight, None, state[:, 1:], batch)
    with pytest.raises(ValueError, match="activation 'relu'"):
        causal_conv(x, weight, None, state, batch, activation="relu")
    with pytest.raises(ValueError, match=r"weight \[4, 8\] of torch.float64"):
        causal_conv(x, weight.double(), None, state, batch)
    with pytest.raises(ValueError, match="each page dense"):
        causal_conv(x, weight, None, torch.zeros(5, 3, 16)[:, :, ::2], batch)
    with pytest.raises(ValueError, match="positive lengths that sum to the 3 tokens"):
        causal_conv(x, weight, None, state, rows([2], [0], [1]))
    with pytest.raises(ValueError, match=r"must be torch\.int32"):
        causal_conv(
            x,
            weight,
            None,
            state,
            type(batch)(*(each.long() for each in (batch.read_pages,) * 2), batch.query_starts),
        )
    with pytest.raises(ValueError, match=r"\[num_rows \+ 1\]"):
        causal_conv(x, weight, None, state, type(batch)(batch.read_pages, batch.read_pages, batch.read_pages))


MODEL_CALLS = {
    f"{num_rows} rows": ModelCall(
        lambda num_rows=num_rows: causal_conv(
            meta(256, 8192), meta_float32(4, 8192), None, meta_float32(300, 3, 8192), meta_rows(num_rows),
            activation="silu", impl="triton",
        )
    )
    for num_rows in (1, 256)
}  # fmt: skip


def launch_small(draw: SmallOperands) -> None:
    x, weight, bias = draw.normal(9, 70), draw.normal(4, 70).float(), draw.normal(70).float()
    causal_conv(x, weight, bias, draw.normal(4, 3, 70).float(), small_rows(draw.device), impl="triton")
