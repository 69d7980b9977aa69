"""Paged attention: one launch and its reduction for the rows of one query, and one launch for the longer rows."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.triton.attention.decode import attend_decodes
from triptych_kernels.triton.attention.plan import MAX_HEAD_DIM
from triptych_kernels.triton.attention.prefill import attend_prefills

_MAX_VECTORS = 2**31  # keys and values are numbered in 32 bits; offsets into the cache have 64


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    kv_scales: Tensor | None,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    """Compute `ops.paged_attention`; a query has the same bits in any batch.

    A CUDA graph may record a step of decodes, which has as many tokens as rows: nothing is read back, and the lists
    are upper bounds. When it is replayed, the tensors give the lengths of the rows, up to the largest of
    `seq_lens_list`, which determines only the size of the scratch. A row of padding has one query and one key, in
    block 0. Steps with longer rows need the exact `query_lens_list`, which determines the size of their grid.
    """
    head_dim = query.shape[2]
    if head_dim > MAX_HEAD_DIM or kv_cache.numel() // head_dim >= _MAX_VECTORS:
        raise ValueError(
            f"paged_attention: kv_cache {list(kv_cache.shape)}; on CUDA devices head_dim is at most {MAX_HEAD_DIM}, "
            f"and the product of the other axes below {_MAX_VECTORS}"
        )
    if options.scale <= 0.0:
        raise ValueError(f"paged_attention: scale {options.scale} must be positive on CUDA devices")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    operands = query, kv_cache, block_tables, query_starts, seq_lens, options, out
    if query.shape[0] > len(seq_lens):
        attend_prefills(
            *operands,
            kv_scales=kv_scales,
            query_lens=query_lens_list,
            key_lens=seq_lens_list,
        )
    if 1 in query_lens_list:
        attend_decodes(
            *operands,
            kv_scales=kv_scales,
            max_seq_len=max(seq_lens_list),
        )
    return out
