"""Causal attention over the paged cache, for prompts, chunks of prompts and single tokens alike."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from triptych_kernels.dispatch import find_impl


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
    impl: str | None = None,
) -> Tensor:
    """Attend from each row's queries to all of its keys up to and including the query's own position.

    Query i of a row with query length q and sequence length n stands at position n - q + i and sees the keys
    0..n - q + i. Query head h reads key head h // (num_heads // num_kv_heads). What the cache holds past a
    row's end, NaN included, and in block 0 has no influence.

    Args:
        query: [num_tokens, num_heads, head_dim]; the tokens of a row are contiguous, and rows follow each other.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous; this step's keys and values
            have been written.
        block_tables: [num_rows, max_blocks] int32, a row's blocks in order; entries past its last are not read.
        query_starts: [num_rows + 1] int32, a row's first token; ends with num_tokens.
        seq_lens: [num_rows] int32, keys per row.
        scale: multiplies query · key.
        query_lens_list: [num_rows] differences of query_starts, each >= 1, known on the host.
        seq_lens_list: seq_lens, known on the host.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: shapes or lengths disagree; names both.
    Source: PagedAttention, arXiv:2309.06180; grouped queries, arXiv:2305.13245.
    """
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            f"paged_attention: kv_cache {list(kv_cache.shape)} must be a contiguous "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]"
        )
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if query.ndim != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"paged_attention: query {list(query.shape)} does not fit kv_cache {list(kv_cache.shape)}; "
            "it must be [num_tokens, a multiple of num_kv_heads, head_dim]"
        )
    num_rows = len(query_lens_list)
    if (
        len(seq_lens_list) != num_rows
        or seq_lens.shape != (num_rows,)
        or query_starts.shape != (num_rows + 1,)
    ):
        raise ValueError(
            f"paged_attention: query_lens_list has {num_rows} rows, but seq_lens_list has "
            f"{len(seq_lens_list)}, seq_lens {list(seq_lens.shape)}, query_starts "
            f"{list(query_starts.shape)} (one more)"
        )
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows:
        raise ValueError(
            f"paged_attention: block_tables {list(block_tables.shape)} must be "
            f"[num_rows = {num_rows}, max_blocks]"
        )
    _check_lengths(query_lens_list, seq_lens_list, query.shape[0], block_tables.shape[1] * block_size)
    out: Tensor = find_impl("paged_attention", query, impl)(
        query,
        kv_cache,
        block_tables,
        query_starts,
        seq_lens,
        scale,
        query_lens_list=query_lens_list,
        seq_lens_list=seq_lens_list,
    )
    return out


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
