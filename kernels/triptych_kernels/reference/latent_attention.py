"""Multi-head latent attention, one vector at a time in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    block_size = kv_cache.shape[1]
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        for token in range(start, end):
            position = seq_len - (end - start) + (token - start)
            vectors = torch.stack(
                [
                    kv_cache[block_tables[row, key // block_size], key % block_size].double()
                    for key in range(position + 1)
                ]
            )
            for head in range(query.shape[1]):
                weights = torch.softmax(vectors @ query[token, head].double() * scale, dim=0)
                out[token, head] = weights @ vectors[:, :value_dim]
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
    block_size = keys.shape[1]
    slots = torch.zeros((query.shape[0], max_keys), dtype=torch.int32, device=query.device)
    counts = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
    starts = query_starts.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        own_slots = [
            int(block_tables[row, key // block_size]) * block_size + key % block_size
            for key in range(seq_len)
        ]
        for token in range(start, end):
            num_seen = seq_len - (end - 1 - token)
            scores = []
            for slot in own_slots[:num_seen]:
                key = keys[slot // block_size, slot % block_size].double()
                score = (weights[token].double() * (query[token].double() @ key).clamp(min=0)).sum().item()
                scores.append(-math.inf if math.isnan(score) else score)
            best = sorted(range(num_seen), key=lambda key: (-scores[key], key))[:max_keys]
            counts[token] = len(best)
            slots[token, : len(best)] = torch.tensor([own_slots[key] for key in sorted(best)])
    return slots, counts


def chosen_attention(
    query: Tensor,
    vectors: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    value_dim: int,
) -> Tensor:
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    for token, count in enumerate(counts.tolist()):
        own = torch.stack([vectors[slot].double() for slot in slots[token, :count].tolist()])
        for head in range(query.shape[1]):
            weights = torch.softmax(own @ query[token, head].double() * scale, dim=0)
            out[token, head] = weights @ own[:, :value_dim]
    return out


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size, latent_dim = kv_cache.shape[1], latent.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            vector = kv_cache[slot // block_size, slot % block_size]
            vector[:latent_dim] = latent[token]
            vector[latent_dim : latent_dim + rope_key.shape[1]] = rope_key[token]
