"""gated_delta_scan against float64, and its bits."""

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
from triptych_kernels.ops import gated_delta_scan

case = cases_of("gated_delta_scan")
implementation = implementations_of("gated_delta_scan")


def recurrence(
    heads: int, key_heads: int, key_dim: int, value_dim: int, beta_scale: float = 1.0
) -> Recurrence:
    generator = torch.Generator().manual_seed(key_dim)
    rates, bias = torch.rand(heads, generator=generator) * 4, torch.randn(heads, generator=generator)
    keys = key_heads, key_dim
    sizes = [keys, keys, (heads, value_dim), (heads,), (heads,)]
    return Recurrence(
        gated_delta_scan,
        (heads, key_dim, value_dim),
        sizes,
        [rates, bias],
        {"beta_scale": beta_scale},
        num_kept=heads * (key_dim + value_dim + 2),
    )


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("sizes", "beta_scale"),
    [
        *(((2, 1, 32, 64), 1.0), ((4, 2, 16, 24), 2.0), ((3, 3, 10, 7), 1.0)),
        *(((1, 1, 128, 128), 1.0), ((2, 2, 20, 150), 2.0)),
    ],
    ids=str,
)
def test_scans_like_the_reference(sizes: tuple[int, int, int, int], beta_scale: float, case: Case) -> None:
    assert_like_reference(recurrence(*sizes, beta_scale), case)


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
        assert_guesses_are_taken_back(recurrence(4, 2, 24, 40, 2.0), implementation)


@pytest.mark.usefixtures("widest_isa")
def test_is_recorded() -> None:
    assert_recorded(recurrence(4, 2, 16, 24, 2.0))


def test_guesses_are_refused() -> None:
    assert_guesses_are_refused(recurrence(4, 2, 24, 40))


def test_bad_operands_are_refused() -> None:
    own = recurrence(4, 2, 8, 6)
    tokens, state, batch = own.tokens(3, torch.float32), own.state(), rows([3], [0], [1])
    query, key, value, decay, beta = tokens
    others = (*own.parameters, state, batch)
    with pytest.raises(ValueError, match="a divisor of the 4 heads"):
        gated_delta_scan(query[:, :, :7], key, value, decay, beta, *others)
    with pytest.raises(ValueError, match=r"beta \[3, 3\] must be"):
        gated_delta_scan(query, key, value, decay, beta[:, :3], *others)
    with pytest.raises(ValueError, match=r"value of torch.bfloat16"):
        gated_delta_scan(query, key, value.bfloat16(), decay, beta, *others)
    with pytest.raises(ValueError, match=r"must be \[num_pages, 4 heads, 8, 6\]"):
        gated_delta_scan(*tokens, *own.parameters, state[:, :, :4], batch)


def _model_call(num_rows: int) -> torch.Tensor:
    mixed = meta(256, 8192).split((2048, 2048, 4096), dim=1)
    query, key, value = (x.unflatten(1, (-1, 128)) for x in mixed)
    decay, beta = meta(256, 64).chunk(2, dim=1)
    parameters = meta_float32(32), meta_float32(32), meta_float32(300, 32, 128, 128)
    return gated_delta_scan(query, key, value, decay, beta, *parameters, meta_rows(num_rows), impl="triton")


MODEL_CALLS = {
    f"{num_rows} rows": ModelCall(lambda num_rows=num_rows: _model_call(num_rows)) for num_rows in (1, 256)
}


def launch_small(draw: SmallOperands) -> None:
    query, key, value = draw.normal(9, 2, 24), draw.normal(9, 2, 24), draw.normal(9, 4, 20)
    decay, beta, rates, bias = (
        draw.normal(9, 4),
        draw.normal(9, 4),
        draw.normal(4).float(),
        draw.normal(4).float(),
    )
    gated_delta_scan(
        query, key, value, decay, beta, rates.abs(), bias, draw.normal(4, 4, 24, 20).float(),
        small_rows(draw.device), impl="triton",
    )  # fmt: skip
