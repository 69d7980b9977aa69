"""The Triton rms_norm against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import rms_norm

# a mean of up to thousands of squares, summed in float32 as a tree, and rounded once more to the dtype
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
}
# whole rows up to 8192 and read twice beyond; powers of two and not
SHAPES = [
    (1, 1),
    (3, 64),
    (2, 5, 80),
    (3, 9, 128),
    (2, 2, 1030),
    (4, 576),
    (2, 3000),
    (1, 8192),
    (2, 8193),
    (1, 20000),
    (0, 64),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_normalises_like_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    with poisoned_allocations():
        out = rms_norm(x, weight, 1e-5, impl="triton")
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-5, impl="reference"), **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_residual_first_and_returns_the_sum(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    residual = torch.randn(shape, device=device)
    x_before, residual_before = x.clone(), residual.clone()
    with poisoned_allocations():
        out, summed = rms_norm(x, weight, 1e-5, residual, impl="triton")
    expected, expected_sum = rms_norm(x, weight, 1e-5, residual, impl="reference")
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(summed, expected_sum, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_a_float32_input_comes_out_in_the_dtype_of_the_weight(device: torch.device) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 100, device=device)
    weight = torch.randn(100, device=device).half()
    out = rms_norm(x, weight, 1e-5, impl="triton")
    assert out.dtype == torch.float16
    expected = rms_norm(x, weight.float(), 1e-5, impl="reference")
    torch.testing.assert_close(out, expected.half(), **TOLERANCE[torch.float16])


@pytest.mark.parametrize("hidden_size", [200, 9000])
def test_a_row_has_the_same_bits_whatever_is_beside_it(hidden_size: int, device: torch.device) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(4, hidden_size, device=device), torch.randn(hidden_size, device=device)
    together = rms_norm(x, weight, 1e-5, impl="triton")
    assert torch.equal(together[2:3], rms_norm(x[2:3], weight, 1e-5, impl="triton"))


def test_heads_are_read_where_a_packed_projection_has_them(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(4)
    packed = torch.randn(5, 11, 96, device=device).to(dtype)
    weight = torch.randn(96, device=device).to(dtype)
    for heads in (packed[:, :7], packed[:, 7:9], packed[:, 10:]):
        with poisoned_allocations():
            out = rms_norm(heads, weight, 1e-5, impl="triton")
        assert out.is_contiguous()
        torch.testing.assert_close(out, rms_norm(heads, weight, 1e-5, impl="reference"), **TOLERANCE[dtype])


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    x, weight = torch.zeros(2, 70, device=device), torch.ones(70, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-5, impl="triton"), x)


def test_half_precision_squares_are_summed_in_float32(device: torch.device) -> None:
    # 300^2 is beyond float16
    x, weight = torch.full((1, 4096), 300.0), torch.ones(4096)
    out = rms_norm(x.half().to(device), weight.half().to(device), 1e-5, impl="triton")
    torch.testing.assert_close(out.cpu(), torch.ones(1, 4096).half(), **TOLERANCE[torch.float16])
