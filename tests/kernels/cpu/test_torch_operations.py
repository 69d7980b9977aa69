"""Recorded operations of torch: the same numbers as torch, for any views and dtypes, at any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.kernels.cpu.recorded import MODES, TOKENS, Mode, assert_recorded, isa, record_function
from triptych_kernels.cpu.expressions import EXPRESSIONS
from triptych_kernels.cpu.recording import NotRecordable
from triptych_kernels.cpu.torch_ops import OPERATIONS

__all__ = ["isa"]
pytestmark = pytest.mark.usefixtures("isa")

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 0.1).reciprocal(),
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 0.1).log(),
    "log1p": lambda x: x.abs().log1p(),
    "tanh": lambda x: torch.tanh(3 * x),
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "cos": torch.cos,
    "sin": torch.sin,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "glu": lambda x: functional.glu(torch.cat((x, x + 1), -1), -1),
    "softplus": lambda x: functional.softplus(8 * x),
    "softplus, beta": lambda x: functional.softplus(x, beta=2.0, threshold=1.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "hardtanh": functional.relu6,
    "clamp": lambda x: x.clamp(-0.3, 0.6),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "add": lambda x: x + 1.5,
    "sub": lambda x: x - 0.3,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * 0.1,
    "div": lambda x: x / 3,
    "div by": lambda x: 2.0 / (x.abs() + 1),
    **{f"pow {e}": lambda x, e=e: (x.abs() + 0.1) ** e for e in (1, 2, 3, 0.5, -0.5, -1, -2, 1.7)},
    "pow of a number": lambda x: 2.0**x,
    "minimum": lambda x: torch.minimum(x, torch.tensor(0.25, dtype=x.dtype)),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.25, dtype=x.dtype)),
    "eq": lambda x: (x > 0) == (x > 1),
    "ne": lambda x: x != 0.5,
    "lt": lambda x: x < 0.3,
    "le": lambda x: x <= 0.3,
    "gt": lambda x: x > 0.3,
    "ge": lambda x: x >= 0.3,
    "logical_not": lambda x: ~(x > 0),
    "logical_and": lambda x: torch.logical_and(x > 0, x < 1),
    "bitwise_or": lambda x: (x > 1) | (x < 0),
    "where": lambda x: torch.where(x > 0, x, -2.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, float("-inf")),
    "fill": lambda x: torch.empty_like(x).copy_(x).fill_(2.0) + x,
    "zero": lambda x: (x + 1).zero_() + x,
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: x * torch.ones_like(x),
    "full_like": lambda x: torch.full_like(x, 0.3) + x,
    "new_zeros": lambda x: x + x.new_zeros(x.shape),
    "new_ones": lambda x: x * x.new_ones(x.shape[-1]),
    "new_full": lambda x: x * x.new_full(x.shape, 0.5),
    "zeros": lambda x: torch.cat((x, torch.zeros(x.shape, dtype=x.dtype, device=x.device)), -1),
    "full": lambda x: x + torch.full((1, x.shape[1], *x.shape[2:-1], 1), 0.5, dtype=x.dtype, device=x.device),
    "clone": lambda x: x.clone(),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "to float32": lambda x: x.float(),
    "to int64": lambda x: (10 * x).long(),
    "to bool": lambda x: (x > 0).to(x.dtype),
    "cat": lambda x: torch.cat((-x, x), -1),
    "stack": lambda x: torch.stack((x, -x), -1).flatten(-2),
    "constant_pad_nd": lambda x: functional.pad(x, (1, 2), value=0.5),
    "repeat": lambda x: x.repeat(1, 1, *[2] * (x.ndim - 3), 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, -1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "amin": lambda x: x.amin(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "norm": lambda x: x.norm(2, -1, keepdim=True),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "var": lambda x: x.var(-1, keepdim=True, correction=0),
    "std": lambda x: torch.cat((x, x + 1), -1).std(-1),
    "_softmax": lambda x: x.softmax(-1),
    "_log_softmax": lambda x: functional.log_softmax(x, -1),
}
"""Name of an operation -> functions of one tensor, of numbers around 0."""
DTYPES = (torch.float32, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
sizes = st.integers(1, 70)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def matters(dtype: torch.dtype, name: str) -> Mapping[str, float]:
    """Return tolerances: those of the vector functions, which are exact to 1e-7 of the largest value."""
    del name
    return {"rtol": 3e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNARY)
def test_operation_equals_torch(name: str, mode: Mode) -> None:
    for dtype in DTYPES:
        for shape in ((TOKENS, 5), (TOKENS, 3, 40)):
            with mode():
                assert_recorded(UNARY[name], some(*shape, dtype=dtype), **matters(dtype, name))
