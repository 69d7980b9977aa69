"""selective_scan against float64, and its bits."""

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
from triptych_kernels.ops import selective_scan

case = cases_of("selective_scan")
implementation = implementations_of("selective_scan")


def recurrence(channels: int, state_size: int) -> Recurrence:
    generator = torch.Generator().manual_seed(channels)
    rates = torch.rand(state_size, channels, generator=generator) * 4
    skip = torch.randn(channels, generator=generator)
    sizes = [(channels,), (channels,), (state_size,), (state_size,)]
    return Recurrence(
        selective_scan,
        (state_size, channels),
        sizes,
        [rates, skip],
        num_kept=2 * channels + -(-channels // 64) * state_size,
    )


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("sizes", [(64, 16), (150, 16), (7, 5)], ids=str)
def test_scans_like_the_reference(sizes: tuple[int, int], case: Case) -> None:
    assert_like_reference(recurrence(*sizes), case)


@pytest.mark.quick_cases(2)
def test_cuts_give_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_however_cut(recurrence(70, 16), implementation)


@pytest.mark.quick_cases(2)
def test_a_row_alone_has_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_alone(recurrence(70, 16), implementation)


@pytest.mark.quick_cases(2)
def test_guesses_are_taken_back(implementation: Implementation) -> None:
    if implementation.isa:
        assert_guesses_are_taken_back(recurrence(150, 16), implementation)


@pytest.mark.usefixtures("widest_isa")
def test_is_recorded() -> None:
    assert_recorded(recurrence(40, 16))


def test_guesses_are_refused() -> None:
    assert_guesses_are_refused(recurrence(150, 16))


def test_bad_operands_are_refused() -> None:
    own = recurrence(40, 16)
    x, dt, b, c = own.tokens(3, torch.float32)
    state, batch = own.state(), rows([3], [0], [1])
    with pytest.raises(ValueError, match=r"\[num_tokens, state_size = 16\] twice"):
        selective_scan(x, dt, b[:, 1:], c, *own.parameters, state, batch)
    with pytest.raises(ValueError, match="does not fit rates"):
        selective_scan(x, dt, b, c, *own.parameters, state[:, 1:], batch)
    with pytest.raises(ValueError, match=r"dt of torch.bfloat16"):
        selective_scan(x, dt.bfloat16(), b, c, *own.parameters, state, batch)


def _model_call(num_rows: int) -> torch.Tensor:
    parameters = meta_float32(16, 8192), meta_float32(8192), meta_float32(300, 16, 8192)
    tokens = meta(256, 8192), meta(256, 8192), meta(256, 16), meta(256, 16)
    return selective_scan(*tokens, *parameters, meta_rows(num_rows), impl="triton")


MODEL_CALLS = {
    f"{num_rows} rows": ModelCall(lambda num_rows=num_rows: _model_call(num_rows)) for num_rows in (1, 256)
}


def launch_small(draw: SmallOperands) -> None:
    x, dt, b, c = draw.normal(9, 70), draw.normal(9, 70), draw.normal(9, 16), draw.normal(9, 16)
    rates, skip = draw.normal(16, 70).float().abs(), draw.normal(70).float()
    selective_scan(
        x, dt, b, c, rates, skip, draw.normal(4, 16, 70).float(), small_rows(draw.device), impl="triton"
    )
