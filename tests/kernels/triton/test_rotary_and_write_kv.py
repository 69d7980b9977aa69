"""The Triton rotary_and_write_kv against the two references that it fuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import rotary_and_write_kv, write_kv

# computed in float32 and rounded once; the two products may cancel, so the tolerance is absolute too
TOLERANCE = {
    torch.float32: {"rtol": 0.0, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-6},
}
SLOTS = [11, 4, -1, 0, 5]


def _operands(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value as projected: views; positions, angles, slots."""
    torch.manual_seed(0)
    packed = torch.randn(len(SLOTS), num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = torch.rand(20, head_dim // 2, device=device) * 6
    positions = torch.tensor([19, 0, 7, 7, 1], device=device)
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return query, key, value, positions, cos_sin_cache, torch.tensor(SLOTS, device=device)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 2), (9, 3, 64), (20, 20, 80), (6, 2, 96), (14, 2, 128), (3, 1, 256)],
)
def test_rotates_and_writes_like_the_references(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    *operands, slots = _operands(num_heads, num_kv_heads, head_dim, dtype, device)
    kv_cache = torch.randn(3, 2, num_kv_heads, 4, head_dim, device=device).to(dtype)
    expected_cache = kv_cache.clone()
    before = [operand.clone() for operand in operands]
    expected = rotary_and_write_kv(*operands, expected_cache, slots, impl="reference")
    with poisoned_allocations():
        rotated = rotary_and_write_kv(*operands, kv_cache, slots, impl="triton")
    torch.testing.assert_close(rotated, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(kv_cache[:, 0], expected_cache[:, 0], **TOLERANCE[dtype])
    assert torch.equal(kv_cache[:, 1], expected_cache[:, 1])
    assert all(torch.equal(operand, copy) for operand, copy in zip(operands, before, strict=True))


@pytest.mark.parametrize("cache_dtype", LARGEST_ELEMENT)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_quantizes_what_it_rotated(head_dim: int, cache_dtype: torch.dtype, device: torch.device) -> None:
    query, key, value, positions, cos_sin_cache, slots = _operands(4, 2, head_dim, torch.float32, device)
    exact_cache = torch.zeros(3, 2, 2, 4, head_dim, device=device)
    rotary_and_write_kv(query, key, value, positions, cos_sin_cache, exact_cache, slots, impl="triton")
    kv_cache = torch.zeros(3, 2, 2, 4, head_dim, device=device).to(cache_dtype)
    kv_scales = torch.full((3, 2, 2, 4), 9.0, device=device)
    operands = query, key, value, positions, cos_sin_cache, kv_cache, slots
    rotary_and_write_kv(*operands, kv_scales=kv_scales, impl="triton")
    # what write_kv makes of the rotated keys: its own tests say what that must be
    written = [0, 1, 3, 4]
    blocks, offsets = slots[written] // 4, slots[written] % 4
    rotated_key, same_value = exact_cache[blocks, 0, :, offsets], exact_cache[blocks, 1, :, offsets]
    expected_cache, expected_scales = torch.zeros_like(kv_cache), torch.full_like(kv_scales, 9.0)
    write_kv(
        rotated_key, same_value, expected_cache, slots[written], kv_scales=expected_scales, impl="triton"
    )
    assert torch.equal(kv_scales, expected_scales)
    assert torch.equal(kv_cache.view(torch.uint8), expected_cache.view(torch.uint8))


def test_a_key_that_is_not_finite_has_scale_nan(device: torch.device) -> None:
    query, key, value, positions, cos_sin_cache, slots = _operands(2, 2, 64, torch.float32, device)
    key[0, 0, 40], value[1, 1, 3] = torch.nan, torch.inf
    kv_cache = torch.ones(3, 2, 2, 4, 64, dtype=torch.int8, device=device)
    kv_scales = torch.zeros(3, 2, 2, 4, device=device)
    operands = query, key, value, positions, cos_sin_cache, kv_cache, slots
    rotary_and_write_kv(*operands, kv_scales=kv_scales, impl="triton")
    assert kv_scales.isnan().nonzero().tolist() == [[1, 1, 1, 0], [2, 0, 0, 3]]
    assert not kv_cache[2, 0, 0, 3].any()
    assert not kv_cache[1, 1, 1, 0].any()


def test_no_tokens_write_nothing(device: torch.device) -> None:
    query, key, value, positions, cos_sin_cache, slots = _operands(2, 1, 64, torch.float32, device)
    kv_cache = torch.zeros(3, 2, 1, 4, 64, device=device)
    none = (query[:0], key[:0], value[:0], positions[:0], cos_sin_cache, kv_cache, slots[:0])
    assert list(rotary_and_write_kv(*none, impl="triton").shape) == [0, 2, 64]
    assert not kv_cache.any()
