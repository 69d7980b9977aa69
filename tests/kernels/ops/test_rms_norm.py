"""rms_norm against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32, meta_heads
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.ops import rms_norm

# Triton keeps rows up to 8192 in registers and reads them twice beyond; sizes are powers of two and not
SHAPES = [
    (0, 8),
    (0, 64),
    (1, 1),
    (3, 7),
    (3, 64),
    (2, 5, 64),
    (2, 5, 80),
    (3, 9, 128),
    (2, 2, 1030),
    (4, 576),
    (2, 3000),
    (1, 8192),
    (2, 8193),
    (1, 20000),
]

# A mean of up to thousands of squares, summed in float32, and rounded once more to the dtype: float16 keeps 11 bits and
# bfloat16 8. The float32 sum may turn a rounded element into its neighbour.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
}

case = cases_of("rms_norm")
implementation = implementations_of("rms_norm")


@pytest.mark.parametrize("shape", SHAPES)
def test_normalises_like_the_reference(shape: tuple[int, ...], case: Case) -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(shape).to(case.device, case.dtype),
        torch.randn(shape[-1]).to(case.device, case.dtype),
    )
    expected = rms_norm(x, weight, 1e-5, impl="reference")
    torch.testing.assert_close(case(rms_norm, x, weight, 1e-5), expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_residual_first_and_returns_the_sum(shape: tuple[int, ...], case: Case) -> None:
    torch.manual_seed(1)
    x, weight = (
        torch.randn(shape).to(case.device, case.dtype),
        torch.randn(shape[-1]).to(case.device, case.dtype),
    )
    residual = torch.randn(shape).to(case.device)
    x_before, residual_before = x.clone(), residual.clone()
    out, summed = case(rms_norm, x, weight, 1e-5, residual)
    expected, expected_sum = rms_norm(x, weight, 1e-5, residual, impl="reference")
    torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])
    torch.testing.assert_close(summed, expected_sum, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_float32_inputs_come_out_in_the_dtype_of_the_weight(case: Case) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(3, 100).to(case.device), torch.randn(100).to(case.device, case.dtype)
    out = case(rms_norm, x, weight, 1e-5)
    assert out.dtype == case.dtype
    expected = rms_norm(x, weight.float(), 1e-5, impl="reference").to(case.dtype)
    torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", [(3, 7), (3, 100), (2, 5, 80), (2, 8200)])
def test_x_weight_and_result_may_differ_in_dtype(
    shape: tuple[int, ...], has_residual: bool, case: Case
) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(shape).to(case.device), torch.randn(shape[-1]).to(case.device) + 1
    residual = torch.randn(shape).to(case.device) if has_residual else None
    for x_dtype, weight_dtype, out_dtype in product({torch.float32, case.dtype}, repeat=3):
        for given in (weight.to(weight_dtype), None):
            operands = x.to(x_dtype), given, 1e-5, residual
            found = case(rms_norm, *operands, out_dtype=out_dtype)
            expected = rms_norm(*operands, out_dtype=out_dtype, impl="reference")
            out, wanted = (found[0], expected[0]) if has_residual else (found, expected)
            assert out.dtype == out_dtype
            torch.testing.assert_close(out, wanted, **TOLERANCE[out_dtype])


def test_without_a_weight_the_result_has_the_dtype_of_x(case: Case) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(6)).to(case.device, case.dtype)
    out = case(rms_norm, x, None, 1e-5)
    assert out.dtype == case.dtype
    torch.testing.assert_close(out, case(rms_norm, x, torch.ones_like(x[0]), 1e-5), **TOLERANCE[case.dtype])


@pytest.mark.parametrize("head_dim", [24, 96])
def test_heads_of_a_packed_projection_are_read_in_place(head_dim: int, case: Case) -> None:
    torch.manual_seed(4)
    packed = torch.randn(5, 11, head_dim).to(case.device, case.dtype)
    weight = torch.randn(head_dim).to(case.device, case.dtype)
    for heads in (packed[:, :7], packed[:, 7:9], packed[:, 10:]):
        out = case(rms_norm, heads, weight, 1e-5)
        assert out.is_contiguous()
        expected = rms_norm(heads, weight, 1e-5, impl="reference")
        torch.testing.assert_close(out, expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("hidden_size", [200, 9000])
def test_a_row_has_the_same_bits_in_any_batch(hidden_size: int, implementation: Implementation) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(4, hidden_size), torch.randn(hidden_size)
    x, weight = x.to(implementation.device), weight.to(implementation.device)
    together = implementation(rms_norm, x, weight, 1e-5)
    assert torch.equal(together[2:3], implementation(rms_norm, x[2:3], weight, 1e-5))


@pytest.mark.parametrize("size", [5, 70])
def test_a_row_of_zeros_stays_zero(size: int, implementation: Implementation) -> None:
    x = torch.zeros(2, size, device=implementation.device)
    assert torch.equal(implementation(rms_norm, x, torch.ones_like(x[0]), 1e-5), x)


def test_squares_are_summed_in_float32(case: Case) -> None:
    # 300^2 is beyond float16, and in bfloat16 the sum of 4,096 ones stops growing at 256
    value = 300.0 if case.dtype == torch.float16 else 1.0
    x = torch.full((1, 4096), value).to(case.device, case.dtype)
    out = case(rms_norm, x, torch.ones_like(x[0]), 1e-5)
    torch.testing.assert_close(out, torch.ones_like(x), **TOLERANCE[case.dtype])


def test_shapes_and_dtypes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight \[3\] does not fit x \[2, 4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match=r"x \[2, 3, 4\] with strides \[4, 8, 1\] must be"):
        rms_norm(torch.ones(3, 2, 4).transpose(0, 1), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="with a residual, all contiguous"):
        rms_norm(torch.ones(2, 6)[:, :4], torch.ones(4), 1e-5, torch.ones(2, 4))
    with pytest.raises(
        ValueError, match=r"x is torch.bfloat16, weight torch.float32, the result torch.float16"
    ):
        rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), 1e-5, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"residual \[1, 4\] torch.float32 does not fit x \[2, 4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5, torch.ones(1, 4))


def _model_call(hidden_size: int, *, residual: bool) -> object:
    x, weight = meta(256, hidden_size), meta(hidden_size)
    if residual:
        return rms_norm(x, weight, 1e-5, meta_float32(256, hidden_size), impl="triton")
    return rms_norm(x, weight, 1e-5, impl="triton")


MODEL_CALLS = {
    "heads of 128": ModelCall(
        lambda: rms_norm(meta_heads(16, 8, 128)[0], meta(128), 1e-6, impl="triton"), is_memory_bound=True
    ),
    "4096, float32 weight": ModelCall(
        lambda: rms_norm(
            meta(256, 4096),
            meta_float32(4096),
            1e-5,
            meta_float32(256, 4096),
            out_dtype=torch.bfloat16,
            impl="triton",
        ),
        is_memory_bound=True,
    ),
    "4096, no residual": ModelCall(lambda: _model_call(4096, residual=False), is_memory_bound=True),
} | {
    f"{size}": ModelCall(lambda size=size: _model_call(size, residual=True), is_memory_bound=True)
    for size in (576, 4096, 8192, 16384)
}


def launch_small(draw: SmallOperands) -> None:
    for width in (33, 576):
        x, weight = draw.normal(5, width), draw.normal(width)
        rms_norm(x, weight, 1e-5, impl="triton")
        rms_norm(x, weight, 1e-5, torch.randn(5, width, device=draw.device), impl="triton")
