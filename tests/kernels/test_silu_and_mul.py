"""silu_and_mul against float64."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import silu_and_mul

# bfloat16 keeps 8 bits, and both silu and the product are rounded
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (5, 34), (2, 3, 128), (0, 6)])
def test_multiplies_like_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 4).to(dtype)
    before = x.clone()
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul(x, impl="reference"), **TOLERANCE[dtype])
    assert torch.equal(x, before)


def test_gate_is_the_first_half() -> None:
    # silu(0) = 0, whatever the second half holds
    assert silu_and_mul(torch.tensor([[0.0, 0.0, 5.0, 7.0]])).tolist() == [[0.0, 0.0]]


def test_an_odd_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x \[2, 3\] must be \[..., 2 \* intermediate_size\]"):
        silu_and_mul(torch.ones(2, 3))
