"""Attention over the paged cache: write this step's keys and values, then attend."""

from __future__ import annotations

from torch import Tensor, nn

from services.worker.attention.base import AttentionBatch
from triptych_kernels.ops import paged_attention, write_kv


class Attention(nn.Module):
    """Causal attention without projections; it has no weights."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Rotated query [num_tokens, num_heads, head_dim], key, value -> [num_tokens, num_heads * head_dim].

        All writes of a step come before any read, so rows may share blocks that one of them fills in this step.
        """
        write_kv(key, value, kv_cache, batch.slot_mapping)
        attended = paged_attention(
            query,
            kv_cache,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            self.scale,
            query_lens_list=batch.query_lens_list,
            seq_lens_list=batch.seq_lens_list,
        )
        return attended.flatten(1)
