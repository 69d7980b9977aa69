"""Writing keys and values into the paged cache, token by token."""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block_id, offset = divmod(slot, block_size)
        for head in range(key.shape[1]):
            kv_cache[block_id, 0, head, offset] = key[token, head]
            kv_cache[block_id, 1, head, offset] = value[token, head]
