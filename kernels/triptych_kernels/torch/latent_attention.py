"""Multi-head latent attention in plain torch, row by row."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

MAX_CHUNK_QUERIES = 256
"""Queries of a row at a time, which bounds the memory of their scores."""


def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    *,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    """Attend in float32 or more, with all scores of MAX_CHUNK_QUERIES at a time."""
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    block_size, width = kv_cache.shape[1:]
    starts = accumulate(query_lens_list, initial=0)
    for row, (first, query_len, seq_len) in enumerate(
        zip(starts, query_lens_list, seq_lens_list, strict=False)
    ):
        pages = block_tables[row, : -(-seq_len // block_size)].long()
        vectors = kv_cache[pages].view(-1, width)[:seq_len].to(dtype)  # [seq_len, width]
        positions = torch.arange(seq_len, device=query.device)
        for start in range(0, query_len, MAX_CHUNK_QUERIES):
            end = min(start + MAX_CHUNK_QUERIES, query_len)
            num_keys = seq_len - query_len + end  # that one of these queries sees
            own = query[first + start : first + end].to(dtype).transpose(0, 1)  # [num_heads, queries, width]
            scores = own @ vectors[:num_keys].t() * scale
            unseen = positions[:num_keys] > positions[seq_len - query_len + start : num_keys, None]
            weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
            attended = weights @ vectors[:num_keys, :value_dim]
            out[first + start : first + end] = attended.transpose(0, 1).to(out.dtype)
    return out


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not written.all():
        latent, rope_key, slot_mapping = latent[written], rope_key[written], slot_mapping[written]
    kv_cache.view(-1, kv_cache.shape[2])[slot_mapping] = torch.cat((latent, rope_key), dim=1).to(
        kv_cache.dtype
    )
