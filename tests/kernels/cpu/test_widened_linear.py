"""Weights of 16 bits for inputs in float32: the bits of float32 weights that hold the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import ACTIVATIONS, GATED_ACTIVATIONS, embedding, gated_linear, linear
from triptych_kernels.weights.packed import WIDENED_DTYPES, PackedWeight, WidenedWeight

DTYPES = tuple(WIDENED_DTYPES)
# (out_features, in_features): fewer than a vector, odd, no multiple of a panel, several panels, several chunks
SHAPES = ((1, 1), (7, 11), (33, 64), (130, 576), (70, 2500))
NUM_ROWS = (0, 1, 2, 5, 11, 12, 13, 25, 60, 130)

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no native kernels are built for this processor")


@pytest.fixture(params=usable_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with forced_isa(request.param):
        use_threads(2)
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def fill(packed: PackedWeight, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> PackedWeight:
    """Fill a weight in two parts."""
    halves = ("gate", "up") if gated else (None,)
    size = len(weight) // len(halves)
    for index, half in enumerate(halves):
        rows = slice(index * size, (index + 1) * size)
        packed.fill_rows(0, weight[rows][: size // 3], half)
        packed.fill_rows(size // 3, weight[rows][size // 3 :], half)
        if bias is not None:
            packed.fill_bias(0, bias[rows], half)
    return packed


def both_forms(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> tuple[PackedWeight, PackedWeight]:
    """Return a weight in its 16 bits, and in float32."""
    options = {"gated": gated, "bias": bias is not None}
    widened = fill(WidenedWeight(*weight.shape, weight.dtype, **options), weight, bias, gated=gated)
    plain = fill(PackedWeight(*weight.shape, torch.float32, **options), weight, bias, gated=gated)
    return widened, plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_float32_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = drawn(*shape, dtype=dtype)
    for bias in (None, drawn(shape[0])):
        widened, plain = both_forms(weight, bias)
        assert widened.data.nbytes * 2 == plain.data.nbytes
        for num_rows in NUM_ROWS:
            x = drawn(num_rows, shape[1] + 3)[:, : shape[1]]  # rows lie apart
            with poisoned_allocations():
                out = linear(x, widened)
            assert torch.equal(out, linear(x, plain))
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "size"), [(3, 5), (50, 64), (40, 1100)])
def test_gated_products_have_the_bits_of_float32_weights(inner: int, size: int, dtype: torch.dtype) -> None:
    widened, plain = both_forms(drawn(2 * inner, size, dtype=dtype), drawn(2 * inner), gated=True)
    for num_rows in (1, 14, 40):
        x = drawn(num_rows, size)
        for activation in GATED_ACTIVATIONS:
            out = gated_linear(x, widened, activation=activation)
            assert torch.equal(out, gated_linear(x, plain, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activated_products_have_the_bits_of_float32_weights(dtype: torch.dtype) -> None:
    widened, plain = both_forms(drawn(50, 64, dtype=dtype), drawn(50))
    for num_rows in (1, 14, 40):
        x = drawn(num_rows, 64)
        for activation in ACTIVATIONS:
            out = linear(x, widened, activation=activation)
            assert torch.equal(out, linear(x, plain, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [576, 2500])
def test_a_row_has_the_same_bits_in_any_batch(in_features: int, dtype: torch.dtype) -> None:
    widened, _ = both_forms(drawn(130, in_features, dtype=dtype))
    x = drawn(161, in_features)
    whole = linear(x, widened)  # tiles that share widened weights; up to 12 rows widen their own
    for num_threads in (1, 2, 5):
        use_threads(num_threads)
        for start, end in ((0, 1), (3, 7), (7, 30), (20, 120), (160, 161)):
            assert torch.equal(linear(x[start:end], widened), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_finite_number_and_infinity_is_widened_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    weight = bits.view(dtype)
    weight = weight[~weight.isnan()][:, None]
    widened, _ = both_forms(weight)
    assert torch.equal(linear(torch.ones(1, 1), widened)[0], weight[:, 0].float() + 0.0)
    token_ids = torch.arange(len(weight))
    assert torch.equal(embedding(token_ids, widened), weight.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 34, 576])
def test_embedding_finds_the_rows_of_the_tokens(size: int, dtype: torch.dtype) -> None:
    weight = drawn(70, size, dtype=dtype)
    widened, _ = both_forms(weight)
    token_ids = torch.tensor([0, 69, 7, 7, 32, 31, 15, 16])
    with poisoned_allocations():
        out = embedding(token_ids, widened)
    assert torch.equal(out, weight[token_ids].float())


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight in torch\.float64 cannot be widened"):
        WidenedWeight(4, 4, torch.float64)
    with pytest.raises(ValueError, match=r"x \[2, 6\] torch.bfloat16 does not fit"):
        linear(torch.ones(2, 6, dtype=torch.bfloat16), WidenedWeight(4, 6, torch.bfloat16))
