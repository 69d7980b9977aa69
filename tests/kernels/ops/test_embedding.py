"""embedding: the rows of a weight, plain or packed, widened if asked."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_int64
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from tests.kernels.ops.weights import random, weight_for
from triptych_kernels.ops import embedding
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.weights.formats import QuantizedFormat

case = cases_of("embedding")
implementation = implementations_of("embedding")


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "own form"])
@pytest.mark.parametrize("hidden_size", [2, 34, 64, 576, 3000])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_finds_the_rows_of_the_tokens(num_tokens: int, hidden_size: int, is_plain: bool, case: Case) -> None:
    weight = random(50, hidden_size, dtype=case.dtype, device=case.device)
    token_ids = torch.tensor([0, 49, 7, 7, 32, 31], device=case.device)[:num_tokens]
    operand = weight if is_plain else weight_for(case.implementation, weight)["weight"]
    for out_dtype in (None, case.dtype, torch.float32):
        out = case(embedding, token_ids, operand, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or case.dtype)
        assert torch.equal(out, weight[token_ids].to(out.dtype))


def test_a_row_may_have_one_element(implementation: Implementation) -> None:
    weight = torch.arange(10.0, device=implementation.device)[:, None]
    token_ids = torch.tensor([9, 0], device=implementation.device)
    assert implementation(embedding, token_ids, weight).tolist() == [[9.0], [0.0]]


def test_triton_takes_a_weight_that_is_a_view(implementation: Implementation) -> None:
    if not implementation.is_triton:
        pytest.skip("native kernels need a contiguous weight")
    weight = torch.randn(32, 10, device=implementation.device).T[:, 4:20]
    token_ids = torch.tensor([9, 0], device=implementation.device)
    assert torch.equal(implementation(embedding, token_ids, weight), weight[[9, 0]])


def test_token_ids_of_another_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"embedding: token_ids \[1, 1\] must be \[num_tokens\]"):
        embedding(torch.zeros(1, 1, dtype=torch.int64), torch.ones(4, 6))


def _quantized(bits: int, *, affine: bool) -> object:
    format, device = QuantizedFormat(bits, "minimum" if affine else "none"), torch.device("meta")
    weight = GroupQuantizedWeight(128256, 4096, torch.bfloat16, format, device=device)
    return embedding(meta_int64(256), weight)


MODEL_CALLS = {
    "widened": ModelCall(
        lambda: embedding(meta_int64(256), meta(128256, 4096), out_dtype=torch.float32, impl="triton"),
        is_memory_bound=True,
    ),
    "4 bits": ModelCall(lambda: _quantized(4, affine=True), is_memory_bound=True),
    "8 bits": ModelCall(lambda: _quantized(8, affine=False), is_memory_bound=True),
}


def launch_small(draw: SmallOperands) -> None:
    token_ids = torch.randint(draw.vocab_size, (7,), device=draw.device)
    embedding(token_ids, draw.normal(draw.vocab_size, 72), out_dtype=torch.float32, impl="triton")
