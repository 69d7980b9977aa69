"""Causal attention over the paged cache, for prompts, chunks of prompts and single tokens alike."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from triptych_kernels.kv_scales import check_kv_scales
from triptych_kernels.registry import find_impl


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    kv_scales: Tensor | None = None,
    window: int = 0,
    query_lens_list: tuple[int, ...] | None = None,
    seq_lens_list: tuple[int, ...] | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend from each row's queries to its keys up to and including the query's own position.

    Query i of a row with query length q and sequence length n stands at position p = n - q + i and sees the keys
    0..p, or the last `window` of them. Query head h reads key head h // (num_heads // num_kv_heads). What the
    cache holds past a row's end or before all of a row's windows, NaN included, and in block 0 has no influence.

    The native kernel gives a query the same bits whatever is beside it, however its prompt is cut into chunks, and
    by any number of threads. The Triton kernels give it the same bits whatever is beside it.

        score = scale * query . key
        out = sum over keys of softmax(scores) * value

    In a cache of int8 or float8_e4m3fn a key is its elements times its scale, and a value likewise; a scale of NaN
    makes NaN of all that see its key.

    Args:
        query: [num_tokens, num_heads, head_dim], a view of something larger if need be, the last axis dense; the
            tokens of a row are contiguous, and rows follow each other.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous; this step's keys and values
            have been written.
        block_tables: [num_rows, max_blocks] int32, a row's blocks in order; entries past its last are not read.
        query_starts: [num_rows + 1] int32, a row's first token; ends with num_tokens.
        seq_lens: [num_rows] int32, keys per row.
        scale: multiplies query · key.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, as `write_kv` left them: required
            where kv_cache is int8 or float8_e4m3fn, else None.
        window: keys that a query sees at most, its own included; 0: all.
        query_lens_list: [num_rows] differences of query_starts, each >= 1, where the host knows them; None: they
            are read from the tensor.
        seq_lens_list: seq_lens, likewise. For a step of single queries that a CUDA graph records, upper bounds
            for all its replays.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: shapes, dtypes or lengths disagree; names both. In a recording there are no lengths yet, so
            who fills its inputs must see to them.
    Source: PagedAttention, arXiv:2309.06180; grouped queries, arXiv:2305.13245; sliding window,
        arXiv:2310.06825.
    """
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            f"paged_attention: kv_cache {list(kv_cache.shape)} must be a contiguous "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]"
        )
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if query.ndim != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads or query.stride(2) != 1:
        raise ValueError(
            f"paged_attention: query {list(query.shape)} with strides {query.stride()} does not fit kv_cache "
            f"{list(kv_cache.shape)}; it must be [num_tokens, a multiple of num_kv_heads, head_dim], the last "
            "axis dense"
        )
    check_kv_scales("paged_attention", kv_cache, kv_scales)
    _check_layout(block_tables, query_starts, seq_lens)
    if window < 0:
        raise ValueError(f"paged_attention: window {window} must be 0 or positive")
    if query.device.type != "meta":
        if query_lens_list is None:
            query_lens_list = tuple(query_starts.diff().tolist())
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        if not len(query_lens_list) == len(seq_lens_list) == len(seq_lens):
            raise ValueError(
                f"paged_attention: query_lens_list has {len(query_lens_list)} rows and seq_lens_list "
                f"{len(seq_lens_list)}, but seq_lens has {len(seq_lens)}"
            )
        _check_lengths(query_lens_list, seq_lens_list, query.shape[0], block_tables.shape[1] * block_size)
    out: Tensor = find_impl("paged_attention", query, impl)(
        query,
        kv_cache,
        block_tables,
        query_starts,
        seq_lens,
        scale,
        kv_scales=kv_scales,
        window=window,
        query_lens_list=query_lens_list,
        seq_lens_list=seq_lens_list,
    )
    return out


def _check_layout(block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor) -> None:
    num_rows = len(seq_lens)
    if seq_lens.shape != (num_rows,) or query_starts.shape != (num_rows + 1,):
        raise ValueError(
            f"paged_attention: query_starts {list(query_starts.shape)} must be one longer than seq_lens "
            f"{list(seq_lens.shape)}"
        )
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows or block_tables.stride(1) != 1:
        raise ValueError(
            f"paged_attention: block_tables {list(block_tables.shape)} with strides {block_tables.stride()} "
            f"must be [num_rows = {num_rows}, max_blocks], the last axis dense"
        )
    dtypes = block_tables.dtype, query_starts.dtype, seq_lens.dtype
    if dtypes != (torch.int32,) * 3:
        raise ValueError(
            f"paged_attention: block_tables, query_starts and seq_lens are {dtypes}; they must be torch.int32"
        )


@lru_cache(maxsize=4)  # asked once per layer with the same step
def _check_lengths(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_tokens: int, capacity: int
) -> None:
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 1 <= query_len <= seq_len <= capacity:
            raise ValueError(
                f"paged_attention: row {row} has {query_len} queries, {seq_len} keys and blocks for "
                f"{capacity}; 1 <= queries <= keys <= blocks must hold"
            )
    if sum(query_lens) != num_tokens:
        raise ValueError(
            f"paged_attention: query_lens_list sums to {sum(query_lens)}, but there are {num_tokens} queries"
        )
