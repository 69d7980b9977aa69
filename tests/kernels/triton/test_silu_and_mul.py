"""The Triton silu_and_mul against float64."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import silu_and_mul

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
