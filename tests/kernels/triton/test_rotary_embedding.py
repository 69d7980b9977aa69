"""The Triton rotary_embedding against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import rotary_embedding

# computed in float32 and rounded once; the two products may cancel, so the tolerance is absolute too
TOLERANCE = {
    torch.float32: {"rtol": 0.0, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-6},
}


def _angles(head_dim: int, device: torch.device) -> torch.Tensor:
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 2), (9, 3, 64), (4, 4, 80), (6, 2, 96), (14, 2, 128), (3, 1, 256)],
)
def test_rotates_like_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    query, key = packed[:, :num_heads], packed[:, num_heads : num_heads + num_kv_heads]  # as projected: views
    positions = torch.tensor([49, 0, 7, 7, 1], device=device)
    cos_sin_cache = _angles(head_dim, device)
    before = packed.clone()
    with poisoned_allocations():
        rotated = rotary_embedding(query, key, positions, cos_sin_cache, impl="triton")
    expected = rotary_embedding(query, key, positions, cos_sin_cache, impl="reference")
    for out, reference in zip(rotated, expected, strict=True):
        torch.testing.assert_close(out, reference, **TOLERANCE[dtype])
        assert out.is_contiguous()
    assert torch.equal(packed, before)


def test_heads_may_lie_before_tokens(device: torch.device) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(2, 3, 4, 64, device=device).transpose(1, 2)  # [4, 3, 64] each
    positions, cos_sin_cache = torch.tensor([3, 1, 4, 1], device=device), _angles(64, device)
    rotated = rotary_embedding(query, key, positions, cos_sin_cache, impl="triton")
    expected = rotary_embedding(query, key, positions, cos_sin_cache, impl="reference")
    torch.testing.assert_close(rotated, expected, **TOLERANCE[torch.float32])


def test_no_tokens_are_rotated_to_none(device: torch.device) -> None:
    query, key = torch.empty(0, 4, 64, device=device), torch.empty(0, 2, 64, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    rotated = rotary_embedding(query, key, positions, _angles(64, device), impl="triton")
    assert [list(out.shape) for out in rotated] == [[0, 4, 64], [0, 2, 64]]
