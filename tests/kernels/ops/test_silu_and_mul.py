"""silu_and_mul against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.ops import silu_and_mul

# of Triton's interpreter: inf, as on GPUs
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

# three roundings in float32, then one or two to the dtype: torch rounds silu before the product
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2**-9, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
}

case = cases_of("silu_and_mul")
implementation = implementations_of("silu_and_mul")


@pytest.mark.parametrize(
    "shape", [(1, 2), (5, 34), (3, 14), (2, 3, 128), (2, 5, 128), (4, 2 * 1025), (0, 6), (0, 8)]
)
def test_multiplies_like_the_reference(shape: tuple[int, ...], case: Case) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 4).to(case.device, case.dtype)
    before = x.clone()
    expected = silu_and_mul(x, impl="reference")
    torch.testing.assert_close(case(silu_and_mul, x), expected, **TOLERANCE[case.dtype])
    assert torch.equal(x, before)


def test_the_gate_is_the_first_half(implementation: Implementation) -> None:
    # silu(0) = 0, whatever the second half holds
    x = torch.tensor([[0.0, 0.0, 5.0, 7.0]], device=implementation.device)
    assert implementation(silu_and_mul, x).tolist() == [[0.0, 0.0]]


def test_a_view_is_gated_like_its_copy(implementation: Implementation) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 40).to(implementation.device)[:, 6:32]
    expected = implementation(silu_and_mul, gate_up.clone())
    assert torch.equal(implementation(silu_and_mul, gate_up), expected)


def test_large_gates_neither_overflow_nor_vanish(implementation: Implementation) -> None:
    gates = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    gate_up = torch.cat((gates, torch.ones(4))).to(implementation.device)
    expected = torch.tensor([0.0, 0.0, 100.0, 1e4], device=implementation.device)
    torch.testing.assert_close(implementation(silu_and_mul, gate_up), expected)


def test_an_odd_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x \[2, 3\] must be \[..., 2 \* intermediate_size\]"):
        silu_and_mul(torch.ones(2, 3))


MODEL_CALLS = {
    "14336": ModelCall(lambda: silu_and_mul(meta(256, 2 * 14336), impl="triton"), is_memory_bound=True),
    "odd, float16": ModelCall(lambda: silu_and_mul(meta(3, 2002, dtype=torch.float16), impl="triton")),
}


def launch_small(draw: SmallOperands) -> None:
    silu_and_mul(draw.normal(3, 2 * 1025), impl="triton")
