"""rms_norm against float64."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import rms_norm

SHAPES = [(1, 1), (3, 7), (2, 5, 64), (0, 8)]

# float32: a mean of tens of squares; bfloat16 keeps 8 bits, and the result is rounded once
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-8, "atol": 0.0}}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalises_like_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = rms_norm(x, weight, 1e-5, impl="reference")
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_residual_first_and_returns_the_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape), torch.randn(shape[-1]).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    out, summed = rms_norm(x, weight, 1e-5, residual)
    expected, expected_sum = rms_norm(x, weight, 1e-5, residual, impl="reference")
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(summed, expected_sum, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


@pytest.mark.parametrize("impl", [None, "torch"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_heads_are_read_where_a_packed_projection_has_them(dtype: torch.dtype, impl: str | None) -> None:
    torch.manual_seed(2)
    packed, weight = torch.randn(5, 11, 24).to(dtype), torch.randn(24).to(dtype)
    for heads in (packed[:, :7], packed[:, 7:9], packed[:, 10:]):
        out = rms_norm(heads, weight, 1e-5, impl=impl)
        assert out.is_contiguous()
        torch.testing.assert_close(out, rms_norm(heads, weight, 1e-5, impl="reference"), **TOLERANCE[dtype])


def test_a_vector_of_zeros_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 5), torch.ones(5), 1e-5), torch.zeros(2, 5))


def test_bfloat16_squares_are_summed_in_float32() -> None:
    # in bfloat16 the sum of 4,096 ones stops growing at 256
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    torch.testing.assert_close(
        rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-5), x, rtol=2**-8, atol=0
    )


def test_shapes_and_dtypes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight \[3\] does not fit x \[2, 4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match=r"x \[2, 3, 4\] with strides \[4, 8, 1\] must be"):
        rms_norm(torch.ones(3, 2, 4).transpose(0, 1), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="with a residual, all contiguous"):
        rms_norm(torch.ones(2, 6)[:, :4], torch.ones(4), 1e-5, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, weight torch.float32"):
        rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"residual \[1, 4\] torch.float32 does not fit x \[2, 4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5, torch.ones(1, 4))
