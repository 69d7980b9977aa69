"""layer_norm against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from tests.kernels.ops.test_rms_norm import TOLERANCE
from triptych_kernels.ops import layer_norm

# Triton keeps rows up to 8192 in registers and reads them three times beyond; sizes are powers of two and not
SHAPES = [(0, 8), (1, 1), (3, 7), (3, 64), (2, 5, 80), (4, 576), (2, 3000), (1, 8192), (2, 8193), (1, 20000)]

case = cases_of("layer_norm")
implementation = implementations_of("layer_norm")


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalises_like_the_reference(shape: tuple[int, ...], has_bias: bool, case: Case) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) + 3).to(case.device, case.dtype)
    weight, bias = torch.randn(2, shape[-1]).to(case.device, case.dtype)
    operands = x, weight, bias if has_bias else None, 1e-5
    expected = layer_norm(*operands, impl="reference")
    atol = 1e-5 if case.dtype == torch.float32 else 1e-3  # a bias may cancel what is rounded before it
    torch.testing.assert_close(
        case(layer_norm, *operands), expected, rtol=TOLERANCE[case.dtype]["rtol"], atol=atol
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adds_the_residual_first_and_returns_the_sum(shape: tuple[int, ...], case: Case) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape).to(case.device, case.dtype)
    weight, bias = torch.randn(2, shape[-1]).to(case.device, case.dtype)
    residual = torch.randn(shape).to(case.device) - 2
    x_before, residual_before = x.clone(), residual.clone()
    out, summed = case(layer_norm, x, weight, bias, 1e-5, residual)
    expected, expected_sum = layer_norm(x, weight, bias, 1e-5, residual, impl="reference")
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[case.dtype]["rtol"], atol=1e-5)
    torch.testing.assert_close(summed, expected_sum, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


@pytest.mark.parametrize("shape", [(3, 7), (3, 100), (2, 5, 80)], ids=str)
def test_x_weight_and_result_may_differ_in_dtype(shape: tuple[int, ...], case: Case) -> None:
    torch.manual_seed(2)
    x, (weight, bias) = torch.randn(shape).to(case.device), torch.randn(2, shape[-1]).to(case.device)
    for x_dtype, weight_dtype, out_dtype in product({torch.float32, case.dtype}, repeat=3):
        for parts in ((weight.to(weight_dtype), bias.to(weight_dtype)), (None, None)):
            operands = x.to(x_dtype), *parts, 1e-5
            out = case(layer_norm, *operands, out_dtype=out_dtype)
            expected = layer_norm(*operands, out_dtype=out_dtype, impl="reference")
            assert out.dtype == out_dtype
            torch.testing.assert_close(out, expected, rtol=TOLERANCE[out_dtype]["rtol"], atol=1e-5)


def test_heads_of_a_packed_projection_are_read_in_place(case: Case) -> None:
    torch.manual_seed(4)
    packed = torch.randn(5, 11, 24).to(case.device, case.dtype)
    weight = torch.randn(24).to(case.device, case.dtype)
    for heads in (packed[:, :7], packed[:, 7:9]):
        out = case(layer_norm, heads, weight, None, 1e-5)
        assert out.is_contiguous()
        expected = layer_norm(heads, weight, None, 1e-5, impl="reference")
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[case.dtype]["rtol"], atol=1e-5)


@pytest.mark.parametrize("size", [200, 9000])
def test_a_row_has_the_same_bits_in_any_batch(size: int, implementation: Implementation) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(4, size).to(implementation.device), torch.randn(size).to(implementation.device)
    together = implementation(layer_norm, x, weight, weight, 1e-5)
    assert torch.equal(together[2:3], implementation(layer_norm, x[2:3], weight, weight, 1e-5))


def test_a_large_mean_does_not_hide_the_variance(implementation: Implementation) -> None:
    x = (torch.randn(3, 500, generator=torch.Generator().manual_seed(7)) + 1000).to(implementation.device)
    expected = layer_norm(x, None, None, 1e-5, impl="reference")
    # x itself keeps 6e-5 of its distances from the mean, and the mean as much
    torch.testing.assert_close(implementation(layer_norm, x, None, None, 1e-5), expected, rtol=0, atol=3e-4)


def test_shapes_and_dtypes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"layer_norm: weight \[3\] does not fit x \[2, 4\]"):
        layer_norm(torch.ones(2, 4), torch.ones(3), None, 1e-5)
    with pytest.raises(ValueError, match=r"layer_norm: bias \[3\] torch.float32 does not fit weight \[4\]"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match=r"layer_norm: bias \[4\] torch.float32 does not fit no weight"):
        layer_norm(torch.ones(2, 4), None, torch.ones(4), 1e-5)


def _model_call(size: int) -> object:
    x, weight, residual = meta(256, size), meta(size), meta_float32(256, size)
    return layer_norm(x, weight, meta(size), 1e-5, residual, impl="triton")


MODEL_CALLS = {
    f"{size}": ModelCall(lambda size=size: _model_call(size), is_memory_bound=True)
    for size in (768, 4096, 16384)
}


def launch_small(draw: SmallOperands) -> None:
    for width in (33, 576):
        x, weight, bias = draw.normal(5, width), draw.normal(width), draw.normal(width)
        layer_norm(x, weight, bias, 1e-5, impl="triton")
        layer_norm(x, weight, None, 1e-5, torch.randn(5, width, device=draw.device), impl="triton")
