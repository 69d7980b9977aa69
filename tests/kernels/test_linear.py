"""Products with plain and packed weights, gated ones and look-ups, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import embedding, gated_linear, gather_rows, linear
from triptych_kernels.weights.packed import PackedWeight

DTYPES = (torch.float32, torch.bfloat16)
# (out_features, in_features): fewer than a vector, no multiple of one, several panels, a long sum
SHAPES = ((1, 2), (7, 10), (33, 64), (96, 34), (130, 576))
NUM_ROWS = (0, 1, 2, 5, 11, 12, 13, 25, 60)


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Packed for each instruction set that this processor has, and plain."""
    with forced_isa("" if request.param == "plain" else request.param):
        use_threads(3)
        yield request.param


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def pack(form: str, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> dict[str, Any]:
    """Return the operands of the ops: the weight in the form under test, filled in two parts, and its bias."""
    if form == "plain":
        return {"weight": weight, "bias": bias}
    packed = PackedWeight(*weight.shape, weight.dtype, gated=gated, bias=bias is not None)
    halves = ("gate", "up") if gated else (None,)
    size = len(weight) // len(halves)
    for index, half in enumerate(halves):
        rows = slice(index * size, (index + 1) * size)
        packed.fill_rows(0, weight[rows][: size // 3], half)
        packed.fill_rows(size // 3, weight[rows][size // 3 :], half)
        if bias is not None:
            packed.fill_bias(0, bias[rows][: size // 2], half)
            packed.fill_bias(size // 2, bias[rows][size // 2 :], half)
    return {"weight": packed}


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype, in_features: int) -> None:
    """Within the rounding of float32 sums, and once of the result in `dtype`."""
    assert out.dtype == expected.dtype
    scale = expected.double().abs().max().item() + 1.0 if expected.numel() else 1.0
    atol = scale * (1e-7 * in_features**0.5 + 1e-6)
    rtol = 1e-5 if out.dtype == torch.float32 and dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_reference(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype)
    for given in (None, bias):
        operands = pack(form, weight, given)
        for num_rows in NUM_ROWS:
            x = random(num_rows, shape[1] + 3, dtype=dtype)[:, : shape[1]]  # rows that do not touch
            for out_dtype in {dtype, torch.float32}:
                expected = linear(x, weight, given, out_dtype=out_dtype, impl="reference")
                assert_near(linear(x, **operands, out_dtype=out_dtype), expected, dtype, shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_products_are_those_of_the_reference(form: str, activation: str, dtype: torch.dtype) -> None:
    for inner, size in ((3, 4), (16, 34), (50, 64)):
        weight, bias = random(2 * inner, size, dtype=dtype), random(2 * inner, dtype=dtype)
        operands = pack(form, weight, bias, gated=True)
        for num_rows in (1, 14):
            x = random(num_rows, size, dtype=dtype) * 4  # far enough for the tails of the activation
            expected = gated_linear(x, weight, bias, activation=activation, impl="reference")
            out = gated_linear(x, **operands, activation=activation)
            # a plain weight in half precision is rounded before the activation too
            rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (2**-6, 0.2)
            torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_every_batch_and_on_any_number_of_threads(form: str, dtype: torch.dtype) -> None:
    if form == "plain":
        pytest.skip("torch chooses its sums by the shape")
    weight = random(130, 576, dtype=dtype)
    operands = pack(form, weight)
    x = random(61, 576, dtype=dtype)
    whole = linear(x, **operands, out_dtype=torch.float32)
    for num_threads in (1, 2, 5):
        use_threads(num_threads)
        for start, end in ((0, 1), (3, 7), (7, 30), (60, 61)):
            assert torch.equal(linear(x[start:end], **operands, out_dtype=torch.float32), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_are_rows_of_the_weight(form: str, dtype: torch.dtype) -> None:
    weight = random(50, 34, dtype=dtype)
    token_ids = torch.tensor([0, 49, 7, 7, 32, 31])
    operand = pack(form, weight)["weight"]
    assert torch.equal(embedding(token_ids, operand), weight[token_ids])
    assert torch.equal(embedding(token_ids, operand, out_dtype=torch.float32), weight[token_ids].float())
    assert embedding(token_ids[:0], operand).shape == (0, 34)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_rows_are_those_asked_for(dtype: torch.dtype) -> None:
    x = random(9, 5, dtype=dtype)
    rows = torch.tensor([8, 0, 0, 3])
    assert torch.equal(gather_rows(x, rows), gather_rows(x, rows, impl="reference"))


def test_operands_that_do_not_fit_are_named(form: str) -> None:
    operands = pack(form, torch.ones(4, 6))
    with pytest.raises(
        ValueError, match=r"linear: x \[2, 5\] torch.float32 does not fit the weight \[4, 6\]"
    ):
        linear(torch.ones(2, 5), **operands)
    with pytest.raises(ValueError, match=r"x \[2, 6\] torch.bfloat16 does not fit"):
        linear(torch.ones(2, 6, dtype=torch.bfloat16), **operands)
    with pytest.raises(ValueError, match=r"bias \[3\] does not fit the weight \[4, 6\]"):
        linear(torch.ones(2, 6), operands["weight"], torch.ones(3))
    with pytest.raises(ValueError, match="gated_linear: activation 'relu' is none of silu"):
        gated_linear(torch.ones(2, 6), operands["weight"], activation="relu")
    with pytest.raises(ValueError, match=r"embedding: token_ids \[1, 1\] must be \[num_tokens\]"):
        embedding(torch.zeros(1, 1, dtype=torch.int64), operands["weight"])
    with pytest.raises(ValueError, match=r"gather_rows: x \[2\] must be"):
        gather_rows(torch.ones(2), torch.zeros(1, dtype=torch.int64))


def test_a_weight_that_no_kernel_multiplies_is_not_packed(form: str) -> None:
    for in_features, dtype in ((3, torch.bfloat16), (4, torch.float16)):
        with pytest.raises(ValueError, match=f"a weight of {in_features} inputs in {dtype} cannot be packed"):
            PackedWeight(4, in_features, dtype)
