"""The Triton write_kv: every token lands in its slot, as the reference puts it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triptych_kernels.ops import write_kv

EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def _assert_same_elements(cache: Tensor, expected: Tensor) -> None:
    """Bit by bit; but the interpreter rounds to 8-bit floats in ways of its own, and its carry into the exponent is
    lost: there all but powers of two are within one step."""
    elements = cache.cpu()
    if cache.dtype == torch.int8 or cache.is_cuda:
        assert torch.equal(elements.view(torch.uint8), expected.view(torch.uint8))
        return
    compared = (expected.view(torch.uint8) & 0b111 != 0) | (expected.float() == 0.0)
    torch.testing.assert_close(elements.float()[compared], expected.float()[compared], rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "block_size", "head_dim"),
    [
        (0, 1, 16, 64),
        (1, 1, 1, 8),
        (9, 3, 16, 64),
        (5, 2, 16, 80),
        (4, 20, 8, 96),
        (4, 2, 16, 128),
        (3, 5, 5, 256),
    ],
)
def test_writes_like_the_reference(
    num_tokens: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, 2 * num_kv_heads, head_dim, device=device).to(dtype)
    key, value = packed[:, :num_kv_heads], packed[:, num_kv_heads:]  # as projected: views
    num_blocks = 4 + num_tokens // block_size
    kv_cache = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, device=device).to(cache_dtype)
    slot_mapping = torch.randperm(num_blocks * block_size)[:num_tokens].to(device)
    slot_mapping[1::4] = -1
    expected = kv_cache.clone()
    write_kv(key, value, expected, slot_mapping, impl="reference")
    write_kv(key, value, kv_cache, slot_mapping, impl="triton")
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_quantizes_bit_by_bit_like_the_reference(
    head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 6, 3, head_dim, device=device).to(dtype) * torch.tensor(30.0)
    key[0, 0] = torch.arange(head_dim, device=device).to(dtype) / 2  # ties
    key[0, 0, 0] = 127.0 / (1 if cache_dtype == torch.int8 else 2)  # scale 1: the ties are exact
    value[1, 2] = 0.0
    value[2, 1, 5] = 1e-7 if dtype == torch.float16 else 1e-44
    value[2, 1, 6:] = value[2, 1, :5] = 0.0
    kv_cache = torch.zeros(3, 2, 3, 4, head_dim, device=device).to(cache_dtype)
    kv_scales = torch.full((3, 2, 3, 4), 9.0, device=device)
    slot_mapping = torch.tensor([11, 4, -1, 0, 5, 6], device=device)
    # on the CPU, as torch divides by a number on GPUs by multiplying with its reciprocal
    expected, expected_scales = kv_cache.cpu().clone(), kv_scales.cpu().clone()
    write_kv(
        key.cpu(), value.cpu(), expected, slot_mapping.cpu(), kv_scales=expected_scales, impl="reference"
    )
    write_kv(key, value, kv_cache, slot_mapping, kv_scales=kv_scales, impl="triton")
    assert torch.equal(kv_scales.cpu(), expected_scales)
    _assert_same_elements(kv_cache, expected)


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS)
@pytest.mark.parametrize("suspect", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_has_scale_nan_and_elements_zero(
    suspect: float, cache_dtype: torch.dtype, device: torch.device
) -> None:
    key = torch.ones(1, 2, 64, device=device)
    key[0, 1, 63] = suspect
    kv_cache = torch.ones(1, 2, 2, 4, 64, device=device).to(cache_dtype)
    kv_scales = torch.zeros(1, 2, 2, 4, device=device)
    slot_mapping = torch.tensor([2], device=device)
    write_kv(key, key, kv_cache, slot_mapping, kv_scales=kv_scales, impl="triton")
    assert kv_scales[0, 0, 0, 2] == 1.0 / (127.0 if cache_dtype == torch.int8 else 448.0)
    assert kv_scales[0, 0, 1, 2].isnan()
    assert kv_cache[0, 0, 1, 2].float().tolist() == [0.0] * 64
