"""state_space_scan against float64, and its bits."""

from __future__ import annotations

import math

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
from triptych_kernels.ops import state_space_scan

case = cases_of("state_space_scan")
implementation = implementations_of("state_space_scan")


def recurrence(
    heads: int, groups: int, state_size: int, head_dim: int, limits: tuple[float, float] = (0.0, math.inf)
) -> Recurrence:
    generator = torch.Generator().manual_seed(state_size)
    parameters = [torch.randn(heads, generator=generator) for _ in range(3)]
    parameters[0] = parameters[0].abs()
    both = groups, state_size
    sizes = [(heads, head_dim), (heads,), both, both]
    shape = heads, state_size, head_dim
    return Recurrence(
        state_space_scan,
        shape,
        sizes,
        parameters,
        {"dt_limits": limits},
        num_kept=heads * (state_size + head_dim + 2),
    )


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("sizes", [(4, 2, 16, 64), (2, 1, 128, 64), (3, 3, 10, 7), (2, 1, 20, 150)], ids=str)
def test_scans_like_the_reference(sizes: tuple[int, int, int, int], case: Case) -> None:
    assert_like_reference(recurrence(*sizes), case)


@pytest.mark.quick_cases(2)
def test_step_sizes_have_limits(case: Case) -> None:
    assert_like_reference(recurrence(2, 1, 16, 24, (0.4, 0.9)), case)


@pytest.mark.quick_cases(2)
def test_cuts_give_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_however_cut(recurrence(2, 1, 24, 40), implementation)


@pytest.mark.quick_cases(2)
def test_a_row_alone_has_the_same_bits(implementation: Implementation) -> None:
    if implementation.has_fixed_sums:
        assert_same_bits_alone(recurrence(2, 1, 24, 40), implementation)


@pytest.mark.quick_cases(2)
def test_guesses_are_taken_back(implementation: Implementation) -> None:
    if implementation.isa:
        assert_guesses_are_taken_back(recurrence(4, 2, 24, 40), implementation)


@pytest.mark.usefixtures("widest_isa")
def test_is_recorded() -> None:
    assert_recorded(recurrence(4, 2, 16, 24))


def test_guesses_are_refused() -> None:
    assert_guesses_are_refused(recurrence(4, 2, 24, 40))


def test_bad_operands_are_refused() -> None:
    own = recurrence(4, 2, 8, 6)
    x, dt, b, c = own.tokens(3, torch.float32)
    state, batch = own.state(), rows([3], [0], [1])
    with pytest.raises(ValueError, match="a divisor of the 4 heads"):
        state_space_scan(x, dt, b[:, :, 1:], c, *own.parameters, state, batch)
    with pytest.raises(ValueError, match=r"dt \[3, 3\] must be"):
        state_space_scan(x, dt[:, :3], b, c, *own.parameters, state, batch)
    with pytest.raises(ValueError, match=r"skip \[2\] of"):
        state_space_scan(x, dt, b, c, *own.parameters[:2], own.parameters[2][:2], state, batch)


def _model_call(num_rows: int) -> torch.Tensor:
    x, b, c, dt = meta(256, 4096 + 2 * 128 + 64).split((4096, 128, 128, 64), dim=1)
    heads, groups = x.unflatten(1, (64, 64)), (y.unflatten(1, (1, 128)) for y in (b, c))
    parameters = [meta_float32(64) for _ in range(3)]
    state = meta_float32(300, 64, 128, 64)
    return state_space_scan(heads, dt, *groups, *parameters, state, meta_rows(num_rows), impl="triton")


MODEL_CALLS = {
    f"{num_rows} rows": ModelCall(lambda num_rows=num_rows: _model_call(num_rows)) for num_rows in (1, 256)
}


def launch_small(draw: SmallOperands) -> None:
    x, dt, b, c = draw.normal(9, 4, 20), draw.normal(9, 4), draw.normal(9, 2, 24), draw.normal(9, 2, 24)
    rates, bias, skip = (draw.normal(4).float().abs() for _ in range(3))
    state = draw.normal(4, 4, 24, 20).float()
    state_space_scan(x, dt, b, c, rates, bias, skip, state, small_rows(draw.device), impl="triton")
