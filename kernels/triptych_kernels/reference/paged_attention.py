"""Paged attention, one query head at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    kv_scales: Tensor | None,
    window: int,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    num_kv_heads, block_size = kv_cache.shape[2:4]
    heads_per_kv_head = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    starts = query_starts.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        for token in range(start, end):
            position = seq_len - (end - start) + (token - start)
            first = max(position - window + 1, 0) if window else 0
            slots = [
                (int(block_tables[row, p // block_size]), p % block_size) for p in range(first, position + 1)
            ]
            for head in range(query.shape[1]):
                kv_head = head // heads_per_kv_head
                keys, values = (
                    torch.stack([kv_cache[block, half, kv_head, offset].double() for block, offset in slots])
                    for half in (0, 1)
                )
                if kv_scales is not None:
                    key_scales, value_scales = (
                        torch.stack([kv_scales[block, half, kv_head, offset] for block, offset in slots])
                        for half in (0, 1)
                    )
                    keys, values = keys * key_scales[:, None], values * value_scales[:, None]
                scores = keys @ query[token, head].double() * scale
                weights = torch.softmax(scores, dim=0)
                out[token, head] = weights @ values
    return out
