"""Multi-head latent attention in plain torch, row by row."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

MAX_CHUNK_QUERIES = 256
"""Queries of a row at a time, which bounds the memory of their scores."""
MAX_CHOOSING_QUERIES = 16
"""Likewise where keys are chosen, by scores of 64 heads in the models of DeepSeek."""


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


def choose_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_keys: int,
    *,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Choose by scores in float32, of MAX_CHOOSING_QUERIES at a time."""
    slots = torch.zeros((query.shape[0], max_keys), dtype=torch.int32, device=query.device)
    counts = torch.empty(query.shape[:1], dtype=torch.int32, device=query.device)
    block_size = keys.shape[1]
    starts = accumulate(query_lens_list, initial=0)
    for row, (first, query_len, seq_len) in enumerate(
        zip(starts, query_lens_list, seq_lens_list, strict=False)
    ):
        positions = torch.arange(seq_len, device=query.device)
        own_slots = block_tables[row, positions // block_size] * block_size + positions % block_size
        vectors = keys.flatten(0, 1)[own_slots.long()].float()  # [seq_len, head_dim]
        for start in range(0, query_len, MAX_CHOOSING_QUERIES):
            end = min(start + MAX_CHOOSING_QUERIES, query_len)
            own = slice(first + start, first + end)
            num_seen = positions[seq_len - query_len + start : seq_len - query_len + end] + 1
            counts[own] = num_seen.clamp(max=max_keys).int()
            products = (query[own].float() @ vectors.t()).relu()  # [queries, num_heads, seq_len]
            scores = (weights[own, :, None] * products).sum(dim=1).nan_to_num(nan=-torch.inf)
            scores.masked_fill_(positions >= num_seen[:, None], -torch.inf)
            # of equal scores the first: so what is not seen comes last
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :max_keys]
            chosen = order.where(order < num_seen[:, None], seq_len).sort(dim=1).values
            slots[own, : chosen.shape[1]] = torch.cat((own_slots, own_slots.new_zeros(1)))[chosen].int()
    return slots, counts


def chosen_attention(
    query: Tensor,
    vectors: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attend in float32 or more, one query at a time."""
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    for token, count in enumerate(counts.tolist()):
        own = vectors[slots[token, :count].long()].to(dtype)  # [count, width]
        weights = (query[token].to(dtype) @ own.t() * scale).softmax(dim=-1)
        out[token] = (weights @ own[:, :value_dim]).to(out.dtype)
    return out


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not written.all():
        latent, rope_key, slot_mapping = latent[written], rope_key[written], slot_mapping[written]
    vectors = torch.cat((latent, rope_key), dim=1).to(kv_cache.dtype)
    kv_cache.view(-1, kv_cache.shape[2])[slot_mapping, : vectors.shape[1]] = vectors
