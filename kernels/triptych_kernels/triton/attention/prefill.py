"""Attention of rows with several queries: prompts and chunks of them.

The keys of a row are cut into parts at fixed positions. Each part has programs of its own, so that few queries after
many keys, as at the end of a long chat, fill the device too. Then the parts' softmaxes are folded in their order:

    keys      0            4096           8192        end
              |   part 0    |   part 1     |  part 2   |
    result    fold(fold(part 0, part 1), part 2)

A row is cut only by positions, so a query has the same bits in any step.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.triton.attention.plan import prefill_tiles, rows_block
from triptych_kernels.triton.attention.tile import attend_keys, begin_softmax, first_seen, locate, score_unit

PART_KEYS = 4096
"""Keys of a part, a multiple of all tiles; shorter rows have one part and nothing to fold. A program at heads of 128
computes about 100 us on so many, and leaves sums of 64 KiB to fold: 2 % of the time, reasoned, not measured."""

MAX_STATE_BYTES = 256 << 20
"""Most bytes of sums that wait to be folded; a step with more parts is computed in several rounds."""

_FOLDED_ROWS = 16
"""Rows of a tile that a program folds: 8 KiB of each part at heads of 128."""

_OF_A_STEP = ("block_tables_stride_0", "num_rows", "first_number", "num_slots")
"""Arguments that change from launch to launch: no kernel is compiled anew if they are 1 or a multiple of 16."""


def attend_prefills(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    out: Tensor,
    *,
    kv_scales: Tensor | None,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
) -> None:
    """Attend from the rows that have more than one query; `out` keeps its content for the others.

    A program takes some tokens of a row with all query heads of one key head, so that each loaded key serves all of
    them. Tiles of keys that all its queries see are computed without masks.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        query_lens: Number of queries of each row. The grid has programs for each tile of queries, key head and part.
        key_lens: Number of keys of each row, or an upper bound.
    """
    num_rows = len(seq_lens)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(query, kv_cache.dtype, head_dim)
    block_m = max(triton.next_power_of_2(group), tiles.block_m)
    tile_tokens = block_m // group
    num_tiles, max_parts = _count(query_lens, key_lens, tile_tokens, PART_KEYS)
    if options.max_keys:
        max_parts = min(max_parts, (options.max_keys + tile_tokens) // PART_KEYS + 2)
    # where the parts do not all fit, there is one more slot, for what is folded so far
    places = num_tiles, num_kv_heads
    num_slots = min(max(MAX_STATE_BYTES // (4 * math.prod(places) * block_m * head_dim) - 1, 1), max_parts)
    all_slots = 0 if max_parts == 1 else num_slots + (num_slots < max_parts)
    states = torch.empty((all_slots, *places, block_m, head_dim), dtype=torch.float32, device=query.device)
    peaks_totals = torch.empty((all_slots, *places, 2, block_m), dtype=torch.float32, device=query.device)
    constants = {
        "WINDOW": options.window, "CHUNK": options.chunk,
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim,
        "TILE_TOKENS": tile_tokens, "ROWS": rows_block(num_rows), "PART_KEYS": PART_KEYS,
        "BLOCK_M": block_m, "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
    }  # fmt: skip
    unit = score_unit(options)
    for first_number in range(0, max_parts, num_slots):
        _attend_part[(*places, min(num_slots, max_parts - first_number))](
            query, query.stride(0), query.stride(1), kv_cache, kv_scales, block_tables, block_tables.stride(0),
            query_starts, seq_lens, num_rows, options.scale, unit, options.sinks, options.alibi,
            out, states, peaks_totals, first_number,
            **constants, SOFT_CAP=float(options.soft_cap), BLOCK_SIZE=block_size, BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if max_parts > 1:
            _fold_parts[(*places, block_m // _FOLDED_ROWS)](
                query_starts, seq_lens, num_rows, unit, out, states, peaks_totals, first_number, num_slots,
                **constants, FOLDED=_FOLDED_ROWS, num_warps=4,
            )  # fmt: skip


@lru_cache(maxsize=4)  # asked once per layer with the same step
def _count(
    query_lens: tuple[int, ...], key_lens: tuple[int, ...], tile_tokens: int, part_keys: int
) -> tuple[int, int]:
    """Return the number of tiles of queries of rows with more than one, and of parts of the longest such row."""
    longer = [(queries, keys) for queries, keys in zip(query_lens, key_lens, strict=True) if queries > 1]
    num_tiles = sum(-(-queries // tile_tokens) for queries, _ in longer)
    return num_tiles, max(-(-keys // part_keys) for _, keys in longer)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _attend_part(
    query, query_stride_0, query_stride_1, kv_cache, kv_scales, block_tables, block_tables_stride_0,
    query_starts, seq_lens, num_rows, scale, unit, sinks, alibi, out, states, peaks_totals, first_number,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr, PART_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to a part of its keys; the result of a tile with one part is final.

    Args:
        states: [slots, tiles, key heads, BLOCK_M, HEAD_DIM] float32, the sums of a part; see `attend_keys`.
        peaks_totals: [slots, tiles, key heads, 2, BLOCK_M] float32, their peaks and totals.
        first_number: Number of the tile's part that slot 0 is for.
    """
    row, first_position, end_key, to_token = _find_tile(query_starts, seq_lens, num_rows, TILE_TOKENS, ROWS)
    first_part, num_parts = _find_parts(first_position, end_key, WINDOW, CHUNK, PART_KEYS)
    slot = tl.program_id(2)
    begin = (first_part + first_number + slot) * PART_KEYS
    end = tl.minimum(begin + PART_KEYS, end_key)
    if begin >= end_key:  # this tile has fewer parts
        return
    kv_head = tl.program_id(1)
    in_tile = tl.arange(0, BLOCK_M)
    positions, heads, present = _find_queries(in_tile, first_position, end_key, kv_head, TILE_TOKENS, GROUP)
    dims = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]
    token_numbers = (positions + to_token).to(tl.int64)
    query_tile = tl.load(
        query + (token_numbers * query_stride_0 + heads * query_stride_1)[:, None] + dims[None, :],
        mask=inside,
        other=0.0,
    )
    first_key = first_seen(first_position, WINDOW, CHUNK)
    all_seen_begin = tl.cdiv(first_seen(end_key - 1, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
    all_seen_end = (first_position + 1) // BLOCK_N * BLOCK_N
    block_table = block_tables + row.to(tl.int64) * block_tables_stride_0

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak, total = begin_softmax(sinks, heads, present, first_number + slot == 0, unit)
    slopes = None
    if alibi is not None:
        slopes = tl.load(alibi + heads)
    # three ranges of keys: those that only the first queries see, those that all see, the queries' own positions
    if WINDOW > 0 or CHUNK > 0:
        acc, peak, total = attend_keys(
            acc, peak, total, query_tile, positions,
            tl.maximum(first_key // BLOCK_N * BLOCK_N, begin), tl.minimum(all_seen_begin, end), first_key, end_key,
            kv_cache, kv_scales, block_table, kv_head, scale, unit, slopes,
            WINDOW, CHUNK, SOFT_CAP, True, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, query_tile, positions,
        tl.maximum(all_seen_begin, begin), tl.minimum(all_seen_end, end), first_key, end_key,
        kv_cache, kv_scales, block_table, kv_head, scale, unit, slopes,
        WINDOW, CHUNK, SOFT_CAP, False, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, query_tile, positions,
        tl.maximum(tl.maximum(all_seen_begin, all_seen_end), begin), end, first_key, end_key,
        kv_cache, kv_scales, block_table, kv_head, scale, unit, slopes,
        WINDOW, CHUNK, SOFT_CAP, True, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if num_parts == 1:
        _store_result(out, acc, total, token_numbers, heads, dims, inside, NUM_KV_HEADS * GROUP, HEAD_DIM)
    else:
        state, sums = _find_sums(
            states, peaks_totals, slot, kv_head, in_tile, dims, NUM_KV_HEADS, HEAD_DIM, BLOCK_M
        )
        tl.store(state, acc, mask=(dims < HEAD_DIM)[None, :])  # of rows without a query, too
        tl.store(sums, peak)
        tl.store(sums + BLOCK_M, total)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _fold_parts(
    query_starts, seq_lens, num_rows, unit, out, states, peaks_totals, first_number, num_slots,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr, PART_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Fold the parts of some queries of a tile with several: those in the slots into those folded before.

    Args:
        num_slots: Number of the slot, after those of parts, that holds what is folded so far.
    """
    _, first_position, end_key, to_token = _find_tile(query_starts, seq_lens, num_rows, TILE_TOKENS, ROWS)
    _, num_parts = _find_parts(first_position, end_key, WINDOW, CHUNK, PART_KEYS)
    kv_head = tl.program_id(1)
    in_tile = tl.program_id(2) * FOLDED + tl.arange(0, FOLDED)
    positions, heads, present = _find_queries(in_tile, first_position, end_key, kv_head, TILE_TOKENS, GROUP)
    dims = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]
    if (num_parts > 1) & (first_number < num_parts):
        folded, folded_sums = _find_sums(
            states, peaks_totals, num_slots, kv_head, in_tile, dims, NUM_KV_HEADS, HEAD_DIM, BLOCK_M
        )
        acc = tl.zeros([FOLDED, BLOCK_D], tl.float32)
        peak = tl.full([FOLDED], float("-inf"), tl.float32)
        total = tl.zeros([FOLDED], tl.float32)
        if first_number > 0:
            acc = tl.load(folded, mask=inside, other=0.0)
            peak = tl.load(folded_sums)
            total = tl.load(folded_sums + BLOCK_M)
        for slot in range(tl.minimum(num_parts - first_number, num_slots)):
            state, sums = _find_sums(
                states, peaks_totals, slot, kv_head, in_tile, dims, NUM_KV_HEADS, HEAD_DIM, BLOCK_M
            )
            acc, peak, total = _fold(
                acc, peak, total, tl.load(state, mask=inside, other=0.0), tl.load(sums), tl.load(sums + BLOCK_M),
                unit,
            )  # fmt: skip
        if first_number + num_slots < num_parts:
            tl.store(folded, acc, mask=inside)
            tl.store(folded_sums, peak)
            tl.store(folded_sums + BLOCK_M, total)
        else:
            token_numbers = (positions + to_token).to(tl.int64)
            _store_result(out, acc, total, token_numbers, heads, dims, inside, NUM_KV_HEADS * GROUP, HEAD_DIM)


@triton.jit
def _find_tile(query_starts, seq_lens, num_rows, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Find the tile of queries that this program is for.

    Returns:
        Its row; the position of its first query; the end of its queries' positions, which is also the end of the keys
        that they see; and the number to add to a position to get the token.
    """
    rows = tl.arange(0, ROWS)
    query_lens = tl.load(query_starts + rows + 1, mask=rows < num_rows, other=0) - tl.load(
        query_starts + rows, mask=rows < num_rows, other=0
    )
    counts = tl.where(query_lens > 1, tl.cdiv(query_lens, TILE_TOKENS), 0)
    # the last tiles of a prompt see the most keys: begun first, they do not keep the device waiting at the end
    row, tile = locate(counts, tl.num_programs(0) - 1 - tl.program_id(0), ROWS)
    first_token = tl.load(query_starts + row)
    seq_len = tl.load(seq_lens + row)
    row_position = seq_len - (tl.load(query_starts + row + 1) - first_token)
    first_position = row_position + tile * TILE_TOKENS
    return row, first_position, tl.minimum(first_position + TILE_TOKENS, seq_len), first_token - row_position


@triton.jit
def _find_parts(first_position, end_key, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PART_KEYS: tl.constexpr):
    """Return the first part with keys that a tile of queries sees, and the number of such parts."""
    end_part = tl.cdiv(end_key, PART_KEYS)
    first_part = first_seen(first_position, WINDOW, CHUNK) // PART_KEYS
    return first_part, end_part - first_part


@triton.jit
def _find_queries(
    in_tile, first_position, end_key, kv_head, TILE_TOKENS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return positions and heads of some rows of a tile, and whether there is such a query.

    A row of the tile is a token and a query head. Rows that are left if GROUP does not divide BLOCK_M have no token.
    """
    positions = first_position + in_tile // GROUP
    heads = kv_head * GROUP + in_tile % GROUP
    return positions, heads, (in_tile < TILE_TOKENS * GROUP) & (positions < end_key)


@triton.jit
def _find_sums(
    states, peaks_totals, slot, kv_head, in_tile, dims,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the addresses of sums and peaks of some rows of this program's tile; totals are BLOCK_M further."""
    place = (slot * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * NUM_KV_HEADS + kv_head
    rows = place * BLOCK_M + in_tile
    return states + (rows * HEAD_DIM)[:, None] + dims[None, :], peaks_totals + (place * BLOCK_M + rows)


@triton.jit
def _fold(acc, peak, total, later_acc, later_peak, later_total, unit):
    """Combine the softmax over some keys with that over later ones, see `attend_keys`.

    Products are added to others only by `fma`, so that the compiler has no choice of rounding.
    """
    new_peak = tl.maximum(peak, later_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen no key yet
    shrink = tl.exp2((peak - base) * unit)
    later_shrink = tl.exp2((later_peak - base) * unit)
    acc = tl.fma(later_acc, later_shrink[:, None], acc * shrink[:, None])
    return acc, new_peak, tl.fma(later_total, later_shrink, total * shrink)


@triton.jit
def _store_result(
    out, acc, total, token_numbers, heads, dims, inside, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    vectors = token_numbers * NUM_HEADS + heads
    values = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (vectors * HEAD_DIM)[:, None] + dims[None, :], values, mask=inside)
