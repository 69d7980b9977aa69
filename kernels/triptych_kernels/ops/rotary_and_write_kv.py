"""Rotary position embedding, and the paged cache that takes the rotated keys."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.ops.rotary_embedding import check_rotary
from triptych_kernels.ops.write_kv import check_write_kv
from triptych_kernels.registry import find_impl


def rotary_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Rotate queries and keys to their positions and write the rotated keys and the values into the cache:
    `rotary_embedding`, then `write_kv`, whose arguments these are.

    Args:
        query: [num_tokens, num_heads, head_dim], a view of something larger if need be; the last axis is dense.
        key: [num_tokens, num_kv_heads, head_dim], likewise, of the query's dtype; rounded to that, rotated, before
            it is rounded to the dtype of the cache or quantized.
        value: like key.
        positions: [num_tokens] int64, each below max_position; not checked, the device is not waited for.
        cos_sin_cache: [max_position, head_dim] float32, contiguous: half = head_dim / 2 cosines, then as many sines.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous, written in place.
        slot_mapping: [num_tokens] int64, distinct; -1: this token's key and value are not written.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, written with the elements:
            required where kv_cache is int8 or float8_e4m3fn, else None.
    Returns:
        The rotated queries, a new tensor like query; also of tokens that are not written.
    Raises:
        ValueError: shapes, dtypes or strides disagree; names both.
    """
    check_rotary("rotary_and_write_kv", query, key, positions, cos_sin_cache)
    check_write_kv("rotary_and_write_kv", key, value, kv_cache, slot_mapping, kv_scales)
    rotated: Tensor = find_impl("rotary_and_write_kv", query, impl)(
        query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping, kv_scales=kv_scales
    )
    return rotated
