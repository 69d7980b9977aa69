"""Paged attention on CPUs: single queries and chunks alike, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES, KV_DTYPES
from triptych_kernels.cpu.program import NotRecordable
from triptych_kernels.torch.paged_attention import paged_attention as torch_paged_attention


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
    query_lens_list: tuple[int, ...] | None,
    seq_lens_list: tuple[int, ...] | None,
) -> Tensor:
    """A cache that no kernel is made for (float16, 8-bit floats) is plain torch's.

    Raises:
        NotRecordable: such a cache in a recording, where there are no lists.
    """
    if kv_cache.dtype not in KV_DTYPES:
        if query_lens_list is None or seq_lens_list is None:
            raise NotRecordable(f"paged_attention: no native kernel reads a cache of {kv_cache.dtype}")
        return torch_paged_attention(
            query, kv_cache, block_tables, query_starts, seq_lens, scale, kv_scales=kv_scales, window=window,
            query_lens_list=query_lens_list, seq_lens_list=seq_lens_list,
        )  # fmt: skip
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(
        "paged_attention", seq_lens, DTYPES[query.dtype], KV_DTYPES[kv_cache.dtype],
        query, query.stride(0), query.stride(1), kv_cache, kv_scales, block_tables,
        block_tables.stride(0), query_starts, seq_lens, out, query.shape[1], num_kv_heads, head_dim, block_size,
        float(scale), window, filled_like=query,
    )  # fmt: skip
    return out
