"""The Triton copy_blocks against copying one by one."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import copy_blocks


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 1, 4, 8), (2, 3, 5, 80), (2, 9, 16, 64), (3,)])
@pytest.mark.parametrize("pairs", [[], [[1, 4]], [[5, 0], [5, 2], [3, 4]]])
def test_copies_like_the_reference(
    pairs: list[list[int]], shape: tuple[int, ...], cache_dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    cache = (torch.randn(6, *shape, device=device) * 50).to(cache_dtype)
    expected = cache.clone()
    on_device = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
    copy_blocks(expected, on_device, impl="reference")
    copy_blocks(cache, on_device, impl="triton")
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_bits_that_are_no_numbers_are_copied_too(device: torch.device) -> None:
    patterns = torch.tensor([0x7FC1, 0xFFC1 - 2**16, 0x7F81, 1], dtype=torch.int16, device=device)
    cache = torch.stack((patterns, torch.zeros_like(patterns))).view(torch.bfloat16)
    copy_blocks(cache, torch.tensor([[0, 1]], device=device), impl="triton")
    assert torch.equal(cache.view(torch.int16)[1], patterns)


def test_pairs_may_be_a_view(device: torch.device) -> None:
    cache = torch.arange(8, device=device).float().view(4, 2)
    pairs = torch.tensor([[0, 1], [3, 2]], device=device).T  # from 0 to 3 and from 1 to 2
    copy_blocks(cache, pairs, impl="triton")
    assert cache.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
