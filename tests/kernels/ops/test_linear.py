"""linear with plain and packed weights against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta
from tests.kernels.ops.implementations import Case, cases_of
from tests.kernels.ops.weights import random, tiles_of_each_width, weight_for
from triptych_kernels.cpu.library import usable_isas, use_threads
from triptych_kernels.ops import ACTIVATIONS, linear
from triptych_kernels.triton.linear.adapters import add_adapters
from triptych_kernels.triton.linear.few_rows import LINEAR, Tiles, multiply_few_rows
from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.weights.adapter_tables import create_adapter_table
from triptych_kernels.weights.adapters import AdaptedRows, AdapterRef
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight

# (out_features, in_features): fewer than a vector, no multiple of one, several panels, a long sum
SHAPES = ((1, 2), (7, 10), (33, 64), (96, 34), (130, 576))
NUM_ROWS = (0, 1, 2, 5, 11, 12, 13, 25, 60)

case = cases_of("linear")


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype, in_features: int) -> None:
    """Compare within the rounding of float32 sums, and of the result in `dtype`."""
    assert out.dtype == expected.dtype
    scale = expected.double().abs().max().item() + 1.0 if expected.numel() else 1.0
    atol = scale * (1e-7 * in_features**0.5 + 1e-6)
    rtol = 1e-5 if out.dtype == torch.float32 and dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_reference(shape: tuple[int, int], case: Case) -> None:
    dtype, device = case.dtype, case.device
    weight, bias = random(*shape, dtype=dtype, device=device), random(shape[0], dtype=dtype, device=device)
    for given in (None, bias):
        operands = weight_for(case.implementation, weight, given)
        for num_rows in NUM_ROWS:
            x = random(num_rows, shape[1] + 3, dtype=dtype, device=device)[:, : shape[1]]  # rows lie apart
            for out_dtype in {dtype, torch.float32}:
                expected = linear(x, weight, given, out_dtype=out_dtype, impl="reference")
                out = case(linear, x, **operands, out_dtype=out_dtype)
                assert_near(out, expected, dtype, shape[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(7, 10), (33, 64)], ids=str)
def test_activated_products_are_those_of_the_reference(
    shape: tuple[int, int], activation: str, case: Case
) -> None:
    dtype, device = case.dtype, case.device
    weight, bias = random(*shape, dtype=dtype, device=device), random(shape[0], dtype=dtype, device=device)
    # a plain weight in half precision is rounded before the activation too
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2**-5, 0.2)
    for given in (None, bias):
        operands = weight_for(case.implementation, weight, given)
        for num_rows in (1, 5, 14):
            x = random(num_rows, shape[1], dtype=dtype, device=device)
            for out_dtype in {dtype, torch.float32}:
                options = {"out_dtype": out_dtype, "activation": activation}
                expected = linear(x, weight, given, **options, impl="reference")
                out = case(linear, x, **operands, **options)
                assert out.dtype == out_dtype
                torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_transformers(activation: str, case: Case) -> None:
    from transformers.activations import ACT2FN

    x = torch.cat((torch.linspace(-30, 30, 2001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 3e4, -3e4])))[
        :, None
    ]
    expected = ACT2FN[activation](x.double())
    x = x.to(case.device, case.dtype)
    weight = torch.tensor([[1.0, 0.0]]).to(case.device, case.dtype)
    x = torch.cat((x, torch.zeros_like(x)), dim=1)
    if case.dtype != torch.float32:
        expected = ACT2FN[activation](x[:, :1].double().cpu())
    out = case(
        linear, x, **weight_for(case.implementation, weight), activation=activation, out_dtype=torch.float32
    )
    rtol = 1e-5 if case.dtype == torch.float32 or case.implementation.isa else 2**-6
    torch.testing.assert_close(out.double().cpu(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_rounded_results_err_less_than_the_rounding(activation: str, case: Case) -> None:
    from transformers.activations import ACT2FN

    if case.dtype != torch.bfloat16 or not case.implementation.isa:
        pytest.skip("other kernels compute activations once")
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.logspace(-20, 0, 200))).bfloat16()
    expected = ACT2FN[activation](x.double())[:, None]
    weight = torch.ones(1, 1, dtype=torch.bfloat16).repeat(1, 2)
    pairs = torch.stack((x, torch.zeros_like(x)), 1)
    out = case(linear, pairs, **weight_for(case.implementation, weight), activation=activation)
    assert out.dtype == torch.bfloat16
    # rounding takes up to 2^-8 of the result; near zero gelu's polynomial errs by up to 5.3e-6
    torch.testing.assert_close(out.double(), expected, rtol=1.05 * 2**-8, atol=5.4e-6)


def test_not_a_number_stays(case: Case) -> None:
    operands = weight_for(case.implementation, torch.ones(5, 2).to(case.device, case.dtype))
    x = torch.tensor([[torch.nan, 1.0]]).to(case.device, case.dtype)
    for activation in ACTIVATIONS:
        assert case(linear, x, **operands, activation=activation).isnan().all()


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="linear: activation 'swiglu_oai' is none of silu"):
        linear(torch.ones(2, 6), torch.ones(4, 6), activation="swiglu_oai")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, case: Case) -> None:
    if not case.implementation.isa or case.dtype != dtype:
        pytest.skip("torch and cuBLAS choose their sums by the shape")
    operands = weight_for(case.implementation, random(130, 576, dtype=dtype))
    x = random(61, 576, dtype=dtype)
    whole = linear(x, **operands, out_dtype=torch.float32)
    for num_threads in (1, 2, 5):
        use_threads(num_threads)
        for start, end in ((0, 1), (3, 7), (7, 30), (60, 61)):
            assert torch.equal(linear(x[start:end], **operands, out_dtype=torch.float32), whole[start:end])


def test_operands_that_do_not_fit_are_named(case: Case) -> None:
    if case.dtype != torch.float32:
        pytest.skip("the same for every dtype")
    operands = weight_for(case.implementation, torch.ones(4, 6))
    with pytest.raises(
        ValueError, match=r"linear: x \[2, 5\] torch.float32 does not fit the weight \[4, 6\]"
    ):
        linear(torch.ones(2, 5), **operands)
    with pytest.raises(ValueError, match=r"x \[2, 6\] torch.bfloat16 does not fit"):
        linear(torch.ones(2, 6, dtype=torch.bfloat16), **operands)
    with pytest.raises(ValueError, match=r"bias \[3\] does not fit the weight \[4, 6\]"):
        linear(torch.ones(2, 6), operands["weight"], torch.ones(3))


@pytest.mark.skipif(not usable_isas(), reason="no native kernels")
@pytest.mark.parametrize(("in_features", "dtype"), [(3, torch.bfloat16), (4, torch.float16)])
def test_a_weight_without_a_kernel_is_not_packed(in_features: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"a weight of {in_features} inputs in {dtype} cannot be packed"):
        PackedWeight(4, in_features, dtype)


def _few_rows(
    num_rows: int,
    out_features: int,
    in_features: int,
    tiles: Tiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
) -> object:
    """Multiply by one of the candidates for such a product."""
    assert tiles in LINEAR.candidates(out_features, in_features, dtype, 1)
    x, weight = (meta(rows, in_features, dtype=dtype) for rows in (num_rows, out_features))
    return multiply_few_rows(x, weight, meta(out_features, dtype=dtype), out_dtype or dtype, None, tiles)


def _quantized(
    num_rows: int, bits: int, *, affine: bool, dtype: torch.dtype = torch.bfloat16, **options: bool
) -> object:
    format, device = QuantizedFormat(bits, "minimum" if affine else "none"), torch.device("meta")
    weight = GroupQuantizedWeight(6144, 4096, dtype, format, device=device, **options)
    return linear(meta(num_rows, 4096, dtype=dtype), weight)


def _w8a8(num_rows: int, element: torch.dtype) -> object:
    weight = ChannelQuantizedWeight(6144, 4096, torch.bfloat16, element, device=torch.device("meta"))
    return linear(meta(num_rows, 4096), weight)


def _adapted(
    num_rows: int,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
) -> object:
    weight = meta(6144, 4096, dtype=dtype)
    pieces = [AdaptedRows(0, 4096), AdaptedRows(4096, 1024), AdaptedRows(5120, 1024)]
    table = create_adapter_table(weight, pieces, num_slots=8, max_rank=rank)
    slots = meta(num_rows, dtype=torch.int32)
    out = meta(num_rows, 6144, dtype=out_dtype or dtype)
    return add_adapters(out, meta(num_rows, 4096, dtype=dtype), AdapterRef(table, slots))


_F8 = torch.float8_e4m3fn

MODEL_CALLS = {
    name: ModelCall(launch, is_memory_bound=True)
    for name, launch in {
        "few rows, 8B, query, key and value": lambda: _few_rows(1, 6144, 4096, Tiles(32, 128, 1, 4, 9)),
        "few rows, 8B, out": lambda: _few_rows(16, 4096, 4096, Tiles(16, 256, 1, 1, 5)),
        "few rows, 8B, down": lambda: _few_rows(1, 4096, 14336, Tiles(64, 256, 4, 4, 3)),
        "few rows, 8B, head": lambda: _few_rows(
            1, 128256, 4096, Tiles(128, 128, 1, 4, 3), out_dtype=torch.float32
        ),
        "few rows, 0.6B, down in float16": lambda: _few_rows(
            4, 1024, 3072, Tiles(16, 512, 4, 2, 5), dtype=torch.float16
        ),
        "few rows, 0.6B, head": lambda: _few_rows(
            1, 151936, 1024, Tiles(64, 64, 1, 4, 9), out_dtype=torch.float32
        ),
        "few rows, float32": lambda: _few_rows(1, 4096, 4096, Tiles(64, 64, 4, 4, 5), dtype=torch.float32),
        "4 bits, a row": lambda: _quantized(1, 4, affine=True),
        "4 bits, 32 rows": lambda: _quantized(32, 4, affine=True),
        "4 bits, 64 rows in float16": lambda: _quantized(64, 4, affine=True, dtype=torch.float16),
        "4 bits, 2048 rows": lambda: _quantized(2048, 4, affine=True),
        "4 bits, 2048 rows by weights": lambda: _quantized(2048, 4, affine=True, batch_invariant=False),
        "4 bits, symmetric, in float32": lambda: _quantized(16, 4, affine=False, dtype=torch.float32),
        "8 bits, a row": lambda: _quantized(1, 8, affine=False),
        "8 bits, 2048 rows": lambda: _quantized(2048, 8, affine=True),
        "8 bits, 2048 rows by weights": lambda: _quantized(2048, 8, affine=False, batch_invariant=False),
        "int8, a row": lambda: _w8a8(1, torch.int8),
        "int8, 64 rows": lambda: _w8a8(64, torch.int8),
        "int8, 2048 rows": lambda: _w8a8(2048, torch.int8),
        "float8, a row": lambda: _w8a8(1, _F8),
        "float8, 2048 rows": lambda: _w8a8(2048, _F8),
        "adapters, a row": lambda: _adapted(1, 16),
        "adapters, 16 rows, sums kept": lambda: _adapted(16, 256, out_dtype=torch.float32),
        "adapters, 2048 rows in float16": lambda: _adapted(2048, 64, dtype=torch.float16),
        "adapters, 64 rows in float32": lambda: _adapted(64, 16, dtype=torch.float32),
        "rows to int8": lambda: quantize_rows(meta(256, 14336), torch.int8),
        "rows to float8": lambda: quantize_rows(meta(256, 28672), _F8),
    }.items()
}


def launch_small(draw: SmallOperands) -> None:
    linear(draw.normal(5, 40), draw.normal(33, 40), impl="triton")
    for in_features in (40, 1100):  # too few to be split, and enough
        x, weight = draw.normal(5, in_features), draw.normal(33, in_features)
        for tiles in tiles_of_each_width(LINEAR, weight):
            multiply_few_rows(x, weight, draw.normal(33), torch.float32, None, tiles)
