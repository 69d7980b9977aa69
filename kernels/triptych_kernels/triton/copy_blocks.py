"""Copying whole blocks within a cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BYTES = 4096  # of one program: two loads of 16 bytes per thread, and 16 programs for a block of 64 KB


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    if not cache.numel() or not pairs.numel():
        return
    num_elements = cache.numel() // cache.shape[0]
    block = _BYTES // cache.itemsize
    grid = (pairs.shape[0], triton.cdiv(num_elements, block))
    _copy_blocks[grid](cache, pairs, pairs.stride(0), pairs.stride(1), num_elements, BLOCK=block, num_warps=4)


@triton.jit
def _copy_blocks(cache, pairs, pair_stride_0, pair_stride_1, num_elements, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0).to(tl.int64) * pair_stride_0
    source, destination = tl.load(pair), tl.load(pair + pair_stride_1)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_elements
    elements = tl.load(cache + source * num_elements + element, mask=inside)
    tl.store(cache + destination * num_elements + element, elements, mask=inside)
