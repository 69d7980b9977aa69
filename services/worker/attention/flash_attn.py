"""Attention by the flash-attn packages, which are optional.

Both take the cache as pages [num_blocks, block_size, num_kv_heads, head_dim] with any strides as long as the last axis
is dense. Views of our cache have this form, so nothing is copied.

Source: FlashAttention-2, arXiv:2307.08691; FlashAttention-3, arXiv:2407.08608; flash_attn_interface.py of each.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import pad

from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.attention.base import AttentionBatch, KvCache


class FlashAttention2:
    """An `AttentionBackend`: `flash_attn`, with blocks of a multiple of 256 tokens."""

    name = "flash-attn"
    in_graphs = (
        True  # decodes read their lengths from the device and split keys by the width of the block table
    )
    writer: str | None = None
    supported = frozenset({"window", "soft_cap", "alibi"})

    def __init__(self) -> None:
        package = import_module("flash_attn")
        self._attend_decodes = package.flash_attn_with_kvcache
        self._attend_rows = package.flash_attn_varlen_func
        self._key_starts: tuple[AttentionBatch, Tensor] | None = None

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        keys, values = _pages(kv_cache)
        attended: Tensor
        if batch.max_query_len == 1:
            attended = self._attend_decodes(
                query[:, None],  # [num_rows, one query, num_heads, head_dim]
                keys,
                values,
                cache_seqlens=batch.seq_lens,
                block_table=batch.block_tables,
                softmax_scale=options.scale,
                causal=True,
                window_size=_window_size(options.window),
                softcap=options.soft_cap,
                alibi_slopes=options.alibi,
            )
            return attended[:, 0]
        attended = self._attend_rows(
            query,
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=self._starts_of_keys(batch),
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=options.scale,
            causal=True,
            window_size=_window_size(options.window),
            softcap=options.soft_cap,
            alibi_slopes=options.alibi,
            block_table=batch.block_tables,
        )
        return attended

    def _starts_of_keys(self, batch: AttentionBatch) -> Tensor:
        """Return [num_rows + 1] int32, of which only differences matter; computed for a step's first layer."""
        if self._key_starts is None or self._key_starts[0] is not batch:
            starts = pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            self._key_starts = batch, starts
        return self._key_starts[1]


class FlashAttention3:
    """An `AttentionBackend`: `flash_attn_interface`, for Hopper, with blocks of any size."""

    name = "flash-attn-3"
    in_graphs = True  # as above; it plans on the device
    writer: str | None = None
    supported = frozenset({"window", "soft_cap"})

    def __init__(self) -> None:
        self._attend = import_module("flash_attn_interface").flash_attn_with_kvcache

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        keys, values = _pages(kv_cache)
        attended: Tensor = self._attend(
            query,
            keys,
            values,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=options.scale,
            causal=True,
            window_size=_window_size(options.window),
            softcap=options.soft_cap,
        )
        return attended


def _window_size(window: int) -> tuple[int, int]:
    """Return the numbers of keys that a query sees before and after its own, as the packages count; -1: all."""
    return (window - 1, 0) if window else (-1, -1)


def _pages(kv_cache: KvCache) -> tuple[Tensor, Tensor]:
    """Return keys and values, each a view [num_blocks, block_size, num_kv_heads, head_dim]."""
    keys, values = kv_cache.blocks.transpose(2, 3).unbind(1)
    return keys, values
