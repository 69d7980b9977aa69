"""Writing keys and values into the paged cache in plain torch."""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    # the two index tensors stand around a slice, so the indexed shape is [num_tokens, num_kv_heads, head_dim]
    kv_cache[:, 0][block_ids, :, offsets] = key.to(kv_cache.dtype)
    kv_cache[:, 1][block_ids, :, offsets] = value.to(kv_cache.dtype)
