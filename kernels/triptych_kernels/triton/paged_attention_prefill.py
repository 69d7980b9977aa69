"""Rows of several queries: prompts and chunks of them."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.paged_attention_plan import prefill_tiles, rows_block
from triptych_kernels.triton.paged_attention_tile import attend_keys, locate


def attend_prefills(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    *,
    kv_scales: Tensor | None,
    window: int,
    soft_cap: float,
    query_lens: tuple[int, ...],
) -> None:
    """Attend from the rows that have more than one query; `out` keeps what it holds for the others.

    A program takes some tokens of a row with all query heads of one key head, so that what it loads of the keys serves
    them all. Tiles of keys that all its queries see are computed without masks.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        query_lens: of the rows; the grid has one program for each tile of queries and key head.
    """
    num_rows = len(seq_lens)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(query, kv_cache.dtype, head_dim)
    block_m = max(triton.next_power_of_2(group), tiles.block_m)
    tile_tokens = block_m // group
    _attend_tile[(_num_tiles(query_lens, tile_tokens), num_kv_heads)](
        query, query.stride(0), query.stride(1), kv_cache, kv_scales, block_tables, block_tables.stride(0),
        query_starts, seq_lens, num_rows, scale, out,
        WINDOW=window, SOFT_CAP=soft_cap, NUM_KV_HEADS=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, TILE_TOKENS=tile_tokens, ROWS=rows_block(num_rows),
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@lru_cache(maxsize=4)  # asked once per layer with the same step
def _num_tiles(query_lens: tuple[int, ...], tile_tokens: int) -> int:
    return sum(-(-query_len // tile_tokens) for query_len in query_lens if query_len > 1)


@triton.jit(do_not_specialize=("block_tables_stride_0", "num_rows"))  # which change from step to step
def _attend_tile(
    query, query_stride_0, query_stride_1, kv_cache, kv_scales, block_tables, block_tables_stride_0,
    query_starts, seq_lens, num_rows, scale, out,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    query_lens = tl.load(query_starts + rows + 1, mask=rows < num_rows, other=0) - tl.load(
        query_starts + rows, mask=rows < num_rows, other=0
    )
    counts = tl.where(query_lens > 1, tl.cdiv(query_lens, TILE_TOKENS), 0)
    # the last tiles of a prompt see the most keys: begun first, they do not keep the device waiting at the end
    row, tile = locate(counts, tl.num_programs(0) - 1 - tl.program_id(0), ROWS)
    kv_head = tl.program_id(1)
    first_token = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - first_token
    seq_len = tl.load(seq_lens + row)

    # a row of the tile is a token and a query head; what is left where GROUP does not divide BLOCK_M has no token
    in_tile = tl.arange(0, BLOCK_M)
    tokens = tile * TILE_TOKENS + in_tile // GROUP
    heads = kv_head * GROUP + in_tile % GROUP
    dims = tl.arange(0, BLOCK_D)
    present = (in_tile < TILE_TOKENS * GROUP) & (tokens < query_len)
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]
    token_numbers = (first_token + tokens).to(tl.int64)
    query_tile = tl.load(
        query + (token_numbers * query_stride_0 + heads * query_stride_1)[:, None] + dims[None, :],
        mask=inside,
        other=0.0,
    )
    first_position = seq_len - query_len + tile * TILE_TOKENS
    positions = seq_len - query_len + tokens
    end_key = tl.minimum(first_position + TILE_TOKENS, seq_len)
    all_seen_end = (first_position + 1) // BLOCK_N * BLOCK_N
    block_table = block_tables + row.to(tl.int64) * block_tables_stride_0

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # three stretches of keys: where windows begin, what all queries see, where the queries themselves stand
    first_key = 0
    all_seen_begin = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        all_seen_begin = tl.cdiv(tl.maximum(end_key - WINDOW, 0), BLOCK_N) * BLOCK_N
        acc, peak, total = attend_keys(
            acc, peak, total, query_tile, positions,
            first_key // BLOCK_N * BLOCK_N, tl.minimum(all_seen_begin, end_key), first_key, end_key,
            kv_cache, kv_scales, block_table, kv_head, scale,
            WINDOW, SOFT_CAP, True, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, query_tile, positions, all_seen_begin, all_seen_end, first_key, end_key,
        kv_cache, kv_scales, block_table, kv_head, scale,
        WINDOW, SOFT_CAP, False, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, query_tile, positions,
        tl.maximum(all_seen_begin, all_seen_end), end_key, first_key, end_key,
        kv_cache, kv_scales, block_table, kv_head, scale,
        WINDOW, SOFT_CAP, True, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    vectors = token_numbers * (NUM_KV_HEADS * GROUP) + heads
    acc /= total[:, None]
    tl.store(out + (vectors * HEAD_DIM)[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
