"""The elements and scales of KV caches of 8 bits.

Such a cache has one scale for each token, key head and half (keys, values), so a vector of head_dim elements is

    scale = max|x| / LARGEST_ELEMENT[dtype], in float32
    element = x / scale, rounded to the nearest element, ties to even, at most the largest in size

A vector of zeros, or one so small that its scale is 0, has scale 0 and elements 0. A vector that is not finite has
scale NaN and elements 0, so queries that see it get NaN. See docs/adr/0007.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_ELEMENT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtype of a cache of 8 bits -> its largest element. Caches of other dtypes hold keys and values without scales."""


def check_kv_scales(op: str, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
    """Check the scales of a cache [num_blocks, 2, num_kv_heads, block_size, head_dim].

    Raises:
        ValueError: They are missing, or not needed, or not a contiguous float32 tensor of the cache's first four
            axes, where the cache is; names both.
    """
    if kv_cache.dtype not in LARGEST_ELEMENT:
        if kv_scales is not None:
            raise ValueError(
                f"{op}: kv_scales {list(kv_scales.shape)} were given, but kv_cache of {kv_cache.dtype} has none; "
                f"of {' and '.join(map(str, LARGEST_ELEMENT))} it has"
            )
        return
    if kv_scales is None:
        raise ValueError(f"{op}: kv_cache of {kv_cache.dtype} needs kv_scales, which are None")
    fits = (
        kv_scales.shape == kv_cache.shape[:4]
        and kv_scales.dtype == torch.float32
        and kv_scales.is_contiguous()
        and kv_scales.device == kv_cache.device
    )
    if not fits:
        raise ValueError(
            f"{op}: kv_scales {list(kv_scales.shape)} {kv_scales.dtype} with strides {kv_scales.stride()} on "
            f"{kv_scales.device} do not fit kv_cache {list(kv_cache.shape)} on {kv_cache.device}; they must be a "
            "contiguous float32 [num_blocks, 2, num_kv_heads, block_size]"
        )
