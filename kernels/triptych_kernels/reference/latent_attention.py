"""Multi-head latent attention, one vector at a time in float64."""

from __future__ import annotations

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


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size, latent_dim = kv_cache.shape[1], latent.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            vector = kv_cache[slot // block_size, slot % block_size]
            vector[:latent_dim] = latent[token]
            vector[latent_dim:] = rope_key[token]
