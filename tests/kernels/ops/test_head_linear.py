"""head_linear against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import head_linear
from triptych_kernels.weights.packed import HeadWeight

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # bfloat16: the result is rounded once, to 8 bits
SHAPES = [(1, 1, 1, 2), (3, 5, 40, 24), (2, 4, 33, 66), (50, 3, 64, 16), (130, 2, 8, 130)]
"""Rows, heads, outputs and inputs."""


@pytest.fixture(params=usable_isas() or [""])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.param:
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(request.param):
        use_threads(2)
        yield
        use_threads(1)


def operands(rows: int, heads: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs, a view with gaps between heads and rows, and a weight for each head."""
    torch.manual_seed(0)
    x = torch.randn(rows, heads, inputs + 4).to(dtype)[..., 2:-2]
    return x, (torch.randn(heads, outputs, inputs) * inputs**-0.5).to(dtype)


def packed(weight: Tensor) -> HeadWeight:
    found = HeadWeight(*weight.shape, weight.dtype)
    for head, rows in enumerate(weight):
        found.fill_head(head, rows)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multiplies_like_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, isa: None
) -> None:
    x, weight = operands(*shape, dtype)
    expected = head_linear(x, weight, impl="reference")
    for found in (head_linear(x, packed(weight)), head_linear(x, weight)):
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, isa: None) -> None:
    x, weight = operands(70, 3, 40, 48, dtype)
    weights = packed(weight)
    together = head_linear(x, weights)
    for first, end in ((0, 1), (69, 70), (5, 22), (0, 40)):
        assert torch.equal(head_linear(x[first:end], weights), together[first:end])


def test_operands_that_disagree_are_named() -> None:
    x, weight = operands(3, 2, 8, 6, torch.float32)
    with pytest.raises(ValueError, match=r"x \[3, 1, 6\] .* does not fit a weight of 2 heads with 6 inputs"):
        head_linear(x[:, :1], weight)
    with pytest.raises(ValueError, match=r"x \[3, 2, 5\] .* does not fit a weight"):
        head_linear(x[..., :5], weight)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 .* of torch\.float32"):
        head_linear(x.bfloat16(), weight)
