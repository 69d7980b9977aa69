"""copy_blocks in plain torch against copying one by one."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import copy_blocks


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("pairs", [[], [[1, 4]], [[5, 0], [5, 2], [3, 4]]])
def test_copies_like_the_reference(pairs: list[list[int]], cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = (torch.randn(6, 2, 3, 5, 8) * 50).to(cache_dtype)
    expected = cache.clone()
    on_device = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    copy_blocks(expected, on_device, impl="reference")
    copy_blocks(cache, on_device)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_block_is_copied_over_another() -> None:
    cache = torch.arange(6.0).view(3, 2)
    copy_blocks(cache, torch.tensor([[2, 0]]))
    assert cache.tolist() == [[4.0, 5.0], [2.0, 3.0], [4.0, 5.0]]


def test_shapes_and_dtypes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"cache \[2, 3\] with strides \(1, 2\) must be a contiguous"):
        copy_blocks(torch.ones(3, 2).T, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"pairs \[2\] torch.int64 must be int64 \[num_pairs, 2\]"):
        copy_blocks(torch.ones(3, 2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"pairs \[1, 2\] torch.int32"):
        copy_blocks(torch.ones(3, 2), torch.tensor([[0, 1]], dtype=torch.int32))
