"""The gated activations in Triton against float64."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import gated_linear, silu_and_mul
from triptych_kernels.ops.linear import ACTIVATIONS

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # of the interpreter: inf, as on GPUs

# a product of three roundings in float32, rounded once more to the dtype
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
}


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 128), (4, 2 * 1025), (0, 8)])
def test_gates_like_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(shape, device=device).to(dtype)
    expected = silu_and_mul(gate_up, impl="reference")
    torch.testing.assert_close(silu_and_mul(gate_up, impl="triton"), expected, **TOLERANCE[dtype])


def test_a_view_is_gated_like_its_copy(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 40, device=device)[:, 6:32]
    expected = silu_and_mul(gate_up.clone(), impl="triton")
    assert torch.equal(silu_and_mul(gate_up, impl="triton"), expected)


def test_gates_far_from_zero_neither_overflow_nor_vanish(device: torch.device) -> None:
    gates = torch.tensor([-1e4, -100.0, 100.0, 1e4], device=device)
    gate_up = torch.cat((gates, torch.ones(4, device=device)))
    expected = torch.tensor([0.0, 0.0, 100.0, 1e4], device=device)
    torch.testing.assert_close(silu_and_mul(gate_up, impl="triton"), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_product_is_like_the_reference(activation: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24, device=device), torch.randn(2 * 33, 24, device=device)
    bias = torch.randn(2 * 33, device=device)
    for b in (None, bias):
        expected = gated_linear(x, weight, b, activation=activation, impl="reference")
        out = gated_linear(x, weight, b, activation=activation, impl="triton")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
