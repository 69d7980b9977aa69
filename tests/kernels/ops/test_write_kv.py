"""write_kv: every token is written to its slot as the reference does, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta_cache, meta_heads, meta_int64
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import write_kv

case = cases_of("write_kv")
implementation = implementations_of("write_kv")


def _assert_same_elements(cache: Tensor, expected: Tensor, implementation: Implementation) -> None:
    """Compare bit by bit, except for 8-bit floats in Triton's interpreter.

    Its rounding loses the carry into the exponent. Elements other than powers of two are within one step.
    """
    elements = cache.cpu()
    if cache.dtype == torch.int8 or cache.is_cuda or not implementation.is_triton:
        assert torch.equal(elements.view(torch.uint8), expected.view(torch.uint8))
        return
    compared = (expected.view(torch.uint8) & 0b111 != 0) | (expected.float() == 0.0)
    torch.testing.assert_close(elements.float()[compared], expected.float()[compared], rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "block_size", "head_dim"),
    [
        (0, 1, 16, 64),
        (1, 1, 1, 8),
        (300, 3, 1, 8),
        (17, 3, 16, 64),
        (9, 3, 16, 40),
        (5, 2, 16, 80),
        (4, 20, 8, 96),
        (4, 2, 16, 128),
        (3, 5, 5, 256),
    ],
)
def test_writes_like_the_reference(
    num_tokens: int, num_kv_heads: int, block_size: int, head_dim: int, cache_dtype: torch.dtype, case: Case
) -> None:
    if case.implementation.is_triton and cache_dtype not in case.implementation.dtypes:
        pytest.skip("the interpreter rounds to bfloat16 in another way")
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, 2 * num_kv_heads, head_dim).to(case.device, case.dtype)
    key, value = packed[:, :num_kv_heads], packed[:, num_kv_heads:]  # views, as projected
    num_blocks = 4 + num_tokens // block_size
    kv_cache = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim).to(case.device, cache_dtype)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(case.device)
    slots[1::4] = -1
    expected = case.implementation.rows_of(kv_cache, case.dtype)
    write_kv(key, value, expected, slots, impl="reference")
    case(write_kv, key, value, kv_cache, slots)
    assert torch.equal(case.implementation.rows_of(kv_cache, case.dtype), expected)


def test_slot_minus_one_writes_nothing(implementation: Implementation) -> None:
    kv_cache, key = torch.zeros(3, 2, 1, 4, 2), torch.ones(3, 1, 2).to(implementation.device)
    kv_cache = kv_cache.to(implementation.device)
    implementation(write_kv, key, key, kv_cache, torch.tensor([-1, -1, -1], device=implementation.device))
    assert not kv_cache.any()


def test_a_token_is_in_its_block_at_its_offset(implementation: Implementation) -> None:
    device = implementation.device
    kv_cache = torch.zeros(3, 2, 1, 4, 2, device=device)
    key, value = torch.full((1, 1, 2), 5.0, device=device), torch.full((1, 1, 2), 7.0, device=device)
    implementation(write_kv, key, value, kv_cache, torch.tensor([2 * 4 + 3], device=device))
    kv_cache = implementation.rows_of(kv_cache, key.dtype)
    assert kv_cache[2, 0, 0, 3].tolist() == [5.0, 5.0]
    assert kv_cache[2, 1, 0, 3].tolist() == [7.0, 7.0]
    assert kv_cache.sum() == 24.0


@pytest.mark.parametrize("cache_dtype", LARGEST_ELEMENT, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_quantizes_bit_by_bit_like_the_reference(head_dim: int, cache_dtype: torch.dtype, case: Case) -> None:
    torch.manual_seed(0)
    dtype, device = case.dtype, case.device
    key, value = torch.randn(2, 6, 3, head_dim).to(device, dtype) * torch.tensor(30.0)
    key[0, 0] = torch.arange(head_dim).to(device, dtype) / 2  # ties
    key[0, 0, 0] = 127.0 / (1 if cache_dtype == torch.int8 else 2)  # scale 1: the ties are exact
    value[1, 2] = 0.0
    value[2, 1, 5] = 1e-7 if dtype == torch.float16 else 1e-38 if dtype == torch.bfloat16 else 1e-44
    value[2, 1, 6:] = value[2, 1, :5] = 0.0
    kv_cache = torch.zeros(3, 2, 3, 4, head_dim).to(device, cache_dtype)
    kv_scales = torch.full((3, 2, 3, 4), 9.0, device=device)
    slots = torch.tensor([11, 4, -1, 0, 5, 6])
    # on the CPU, as torch divides by a number on GPUs by multiplying with its reciprocal
    expected, expected_scales = kv_cache.cpu().clone(), kv_scales.cpu().clone()
    write_kv(key.cpu(), value.cpu(), expected, slots, kv_scales=expected_scales, impl="reference")
    case(write_kv, key, value, kv_cache, slots.to(device), kv_scales=kv_scales)
    assert torch.equal(kv_scales.cpu(), expected_scales)
    _assert_same_elements(case.implementation.rows_of(kv_cache, dtype), expected, case.implementation)


@pytest.mark.parametrize("cache_dtype", LARGEST_ELEMENT, ids=str)
@pytest.mark.parametrize("flaw", [torch.inf, -torch.inf, torch.nan])
def test_a_vector_that_is_not_finite_has_scale_nan(
    flaw: float, cache_dtype: torch.dtype, implementation: Implementation
) -> None:
    device = implementation.device
    key = torch.ones(1, 2, 64, device=device)
    key[0, 1, 63] = flaw
    kv_cache = torch.ones(1, 2, 2, 4, 64, device=device).to(cache_dtype)
    kv_scales = torch.zeros(1, 2, 2, 4, device=device)
    slots = torch.tensor([2], device=device)
    implementation(write_kv, key, key, kv_cache, slots, kv_scales=kv_scales)
    assert kv_scales[0, 0, 0, 2] == 1.0 / (127.0 if cache_dtype == torch.int8 else 448.0)
    assert kv_scales[0, 0, 1, 2].isnan()
    kv_cache = implementation.rows_of(kv_cache, key.dtype)
    assert kv_cache[0, 0, 1, 2].float().tolist() == [0.0] * 64


def test_shapes_that_disagree_are_named() -> None:
    key, kv_cache, slots = torch.ones(2, 1, 4), torch.zeros(3, 2, 1, 4, 4), torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"kv_cache \[3, 1, 4, 4\] must be a contiguous"):
        write_kv(key, key, kv_cache[:, 0], slots)
    with pytest.raises(ValueError, match=r"key \[2, 2, 2\] does not fit kv_cache \[3, 2, 1, 4, 4\]"):
        write_kv(key.view(2, 2, 2), key, kv_cache, slots)
    with pytest.raises(ValueError, match=r"value \[1, 1, 4\] torch.float32 is not like key \[2, 1, 4\]"):
        write_kv(key, key[:1], kv_cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping \[1\] does not fit key \[2, 1, 4\]"):
        write_kv(key, key, kv_cache, slots[:1])
    with pytest.raises(ValueError, match=r"value .* torch\.bfloat16 is not like key .* torch\.float32"):
        write_kv(key, key.bfloat16(), kv_cache, slots)
    with pytest.raises(ValueError, match="last axes of key and value must be dense"):
        write_kv(key, torch.ones(2, 1, 8)[:, :, ::2], kv_cache, slots)


def _model_call(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    _, key, value = meta_heads(4 * num_kv_heads, num_kv_heads, head_dim)
    kv_cache, kv_scales = meta_cache(num_kv_heads, head_dim, dtype)
    write_kv(key, value, kv_cache, meta_int64(256), kv_scales=kv_scales, impl="triton")


MODEL_CALLS = {
    "heads of 96": ModelCall(lambda: _model_call(32, 96), is_memory_bound=True),
    "heads of 128": ModelCall(lambda: _model_call(8, 128), is_memory_bound=True),
    "heads of 256, one": ModelCall(lambda: _model_call(1, 256), is_memory_bound=True),
    "int8": ModelCall(lambda: _model_call(8, 128, torch.int8), is_memory_bound=True),
    "float8": ModelCall(lambda: _model_call(8, 128, torch.float8_e4m3fn), is_memory_bound=True),
}


def launch_small(draw: SmallOperands) -> None:
    for dtype in draw.kv_dtypes:
        _, key, value = draw.heads()
        cache, scales = draw.cache(dtype)
        write_kv(key, value, cache, draw.slots(), kv_scales=scales, impl="triton")
