"""Attention over the paged cache: rotate, write this step's keys and values, then attend."""

from __future__ import annotations

from torch import Tensor, nn

from services.worker.attention.base import AttentionBatch, KvCache
from services.worker.layers.rotary import RotaryEmbedding
from triptych_kernels.ops import rotary_and_write_kv


class Attention(nn.Module):
    """Causal attention without projections; it has no weights."""

    def __init__(self, head_dim: int, *, window: int = 0) -> None:
        """`window`: see `AttentionBackend.attend`."""
        super().__init__()
        self.scale = head_dim**-0.5
        self.window = window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryEmbedding,
        positions: Tensor,
        kv_cache: KvCache,
        batch: AttentionBatch,
    ) -> Tensor:
        """Query [num_tokens, num_heads, head_dim], key, value as projected -> [num_tokens, num_heads * head_dim].

        All writes of a step come before any read, so rows may share blocks that one of them fills in this step.
        """
        query = rotary_and_write_kv(
            query,
            key,
            value,
            positions,
            rotary.cos_sin_cache,
            kv_cache.blocks,
            batch.slot_mapping,
            kv_scales=kv_cache.scales,
        )
        return batch.backend.attend(query, kv_cache, batch, self.scale, self.window).flatten(1)
