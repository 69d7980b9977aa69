"""Multi-head latent attention: a tile of queries reads each vector once, as key and as value.

A tile is some heads of one token, or of several tokens of a prompt. The vectors that it sees are cut into parts, each
with programs of its own, and the parts' softmaxes are folded in their order:

    rows of one query     as many parts as the row's own length calls for, at most _MAX_PARTS
    longer rows           a part every _PROMPT_PART positions

So a query has the same bits in any batch. A vector's elements are two blocks, the value and the rest of the key, since
a tile's sides are powers of two: 512 and 64 in the models of DeepSeek.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.attention.plan import rows_block
from triptych_kernels.triton.attention.tile import LOG2_E, locate

_MAX_VECTORS = 2**31  # vectors are numbered in 32 bits; offsets into the cache have 64
_MAX_VALUE_DIM = 512
"""Most elements of a value: sums of 64 rows with so many in float32 are half of a multiprocessor's registers."""
_PROMPT_PART = tl.constexpr(4096)
"""Positions of a part of a longer row, as of `attention.prefill`."""
_MAX_PARTS = tl.constexpr(32)
"""Most parts of a row of one query: with 16 heads, four such rows fill a device of 132 multiprocessors."""
_MIN_PART = tl.constexpr(256)
"""Fewest vectors of a part of such a row: 288 KiB in 16 bits, beside which 32 KiB of sums are small."""
_MAX_STATE_BYTES = 256 << 20  # of sums that wait to be folded; a step with more is computed in several rounds
_FOLDED_ROWS = 4  # rows of a tile that a program folds: 8 KiB of each part

_OF_A_STEP = ("block_tables_stride", "num_rows", "first_part", "num_slots")
"""Arguments that change from launch to launch: no kernel is compiled anew if they are 1 or a multiple of 16."""


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
    """Compute `ops.latent_attention`; a query has the same bits in any batch.

    A CUDA graph may record a step of decodes, as of `paged_attention`: nothing is read back, and the lists are upper
    bounds.
    """
    if value_dim > _MAX_VALUE_DIM or kv_cache.shape[0] * kv_cache.shape[1] >= _MAX_VECTORS:
        raise ValueError(
            f"latent_attention: value_dim {value_dim} and kv_cache {list(kv_cache.shape)}; on CUDA devices value_dim "
            f"is at most {_MAX_VALUE_DIM}, and there are fewer than {_MAX_VECTORS} vectors"
        )
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    lens = list(zip(query_lens_list, seq_lens_list, strict=True))
    for one_query in (True, False):
        rows = [(queries, keys) for queries, keys in lens if (queries == 1) == one_query]
        if rows:
            operands = query, kv_cache, block_tables, query_starts, seq_lens, scale, out
            _attend_rows(*operands, rows=rows, one_query=one_query)
    return out


def _attend_rows(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    *,
    rows: list[tuple[int, int]],
    one_query: bool,
) -> None:
    """Attend from the rows that have one query, or from those that have more; `out` keeps its content for the others.

    Args:
        rows: Numbers of queries and of keys of these rows, the latter or upper bounds.
    """
    num_heads, value_dim = out.shape[1:]
    block_m, block_n, num_warps, num_stages = _tiles(query, kv_cache.dtype, num_heads, one_query=one_query)
    tile_heads = min(num_heads, block_m)
    tile_tokens = 1 if one_query else block_m // tile_heads
    num_tiles = sum(-(-queries // tile_tokens) for queries, _ in rows)
    max_keys = max(keys for _, keys in rows)
    if one_query:
        max_parts = min(triton.cdiv(max_keys, _MIN_PART.value), _MAX_PARTS.value)
    else:
        max_parts = triton.cdiv(max_keys, _PROMPT_PART.value)
    places = num_tiles, triton.cdiv(num_heads, tile_heads)
    state_bytes = 4 * num_tiles * places[1] * block_m * value_dim
    # where the parts do not all fit, there is one more slot, for what is folded so far
    num_slots = min(max(_MAX_STATE_BYTES // state_bytes - 1, 1), max_parts)
    all_slots = 0 if max_parts == 1 else num_slots + (num_slots < max_parts)
    states = torch.empty((all_slots, *places, block_m, value_dim), dtype=torch.float32, device=query.device)
    peaks_totals = torch.empty((all_slots, *places, 2, block_m), dtype=torch.float32, device=query.device)
    constants = {
        "ONE_QUERY": one_query, "NUM_HEADS": num_heads, "TILE_HEADS": tile_heads, "TILE_TOKENS": tile_tokens,
        "VALUE_DIM": value_dim, "ROWS": rows_block(len(seq_lens)), "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_V": max(triton.next_power_of_2(value_dim), 16),
    }  # fmt: skip
    rest = query.shape[2] - value_dim
    for first_part in range(0, max_parts, num_slots):
        _attend_part[(*places, min(num_slots, max_parts - first_part))](
            query, query.stride(0), query.stride(1), kv_cache, block_tables, block_tables.stride(0),
            query_starts, seq_lens, len(seq_lens), scale * LOG2_E.value, out, states, peaks_totals, first_part,
            **constants, REST=rest, BLOCK_R=max(triton.next_power_of_2(rest), 16), BLOCK_SIZE=kv_cache.shape[1],
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        if max_parts > 1:
            _fold_parts[(*places, block_m // _FOLDED_ROWS)](
                query_starts, seq_lens, len(seq_lens), out, states, peaks_totals, first_part, num_slots,
                **constants, FOLDED=_FOLDED_ROWS, num_warps=4,
            )  # fmt: skip


def _tiles(
    query: Tensor, cache_dtype: torch.dtype, num_heads: int, *, one_query: bool
) -> tuple[int, int, int, int]:
    """Return the rows of a tile, the vectors of a step, and the warps and stages of a program.

    Reasoned from what the compiler says for compute capability 9.0, not measured. Rows of one query with few heads wait
    for memory, so that their tiles are small; float32 is for tests, not for speed.
    """
    if query.dtype == torch.float32 or cache_dtype == torch.float32:
        return 16, 16, 4, 1
    rows = triton.next_power_of_2(num_heads) if one_query else 64
    return (64, 32, 8, 2) if rows >= 64 else (max(rows, 16), 32, 4, 2)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _attend_part(
    query, query_stride_0, query_stride_1, kv_cache, block_tables, block_tables_stride,
    query_starts, seq_lens, num_rows, unit, out, states, peaks_totals, first_part,
    ONE_QUERY: tl.constexpr, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to a part of its vectors; the result of a tile with one part is final.

    Args:
        states: [slots, tiles, blocks of heads, BLOCK_M, VALUE_DIM] float32, the sums of a part: of values times
            2^(score - peak).
        peaks_totals: [slots, tiles, blocks of heads, 2, BLOCK_M] float32, their peaks, and sums of 2^(score - peak).
        first_part: Number of the tile's part that slot 0 is for.
    """
    row, first_position, end_key, to_token = _find_tile(
        query_starts, seq_lens, num_rows, ONE_QUERY, TILE_TOKENS, ROWS
    )
    part_keys, num_parts = _find_parts(end_key, ONE_QUERY, BLOCK_N)
    slot = tl.program_id(2)
    begin = (first_part + slot) * part_keys
    end = tl.minimum(begin + part_keys, end_key)
    if begin >= end_key:  # this tile has fewer parts
        return
    in_tile = tl.arange(0, BLOCK_M)
    positions, heads, present = _find_queries(
        in_tile, first_position, end_key, NUM_HEADS, TILE_HEADS, TILE_TOKENS
    )
    dims, rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    token_numbers = (positions + to_token).to(tl.int64)
    addresses = query + (token_numbers * query_stride_0 + heads * query_stride_1)[:, None]
    inside = present[:, None] & (dims < VALUE_DIM)[None, :]
    queries = tl.load(addresses + dims[None, :], mask=inside, other=0.0)
    rest_queries = queries
    if REST > 0:
        rest_queries = tl.load(
            addresses + VALUE_DIM + rest[None, :], mask=present[:, None] & (rest < REST)[None, :], other=0.0
        )
    acc, peak, total = _attend_vectors(
        queries, rest_queries, positions, begin, end, end_key,
        kv_cache, block_tables + row.to(tl.int64) * block_tables_stride, unit,
        VALUE_DIM, REST, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_V, BLOCK_R,
    )  # fmt: skip
    if num_parts == 1:
        _store_result(out, acc, total, token_numbers, heads, dims, inside, NUM_HEADS, VALUE_DIM)
    else:
        state, sums = _find_sums(states, peaks_totals, slot, in_tile, dims, VALUE_DIM, BLOCK_M)
        tl.store(state, acc, mask=(dims < VALUE_DIM)[None, :])  # of rows without a query, too
        tl.store(sums, peak)
        tl.store(sums + BLOCK_M, total)


@triton.jit
def _attend_vectors(
    queries, rest_queries, positions, begin, end, end_key, kv_cache, block_table, unit,
    VALUE_DIM: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to the vectors begin..end of their row, BLOCK_N at a time.

    Args:
        queries: [BLOCK_M, BLOCK_V], what meets a vector's value; zeros beyond VALUE_DIM.
        rest_queries: [BLOCK_M, BLOCK_R], what meets the rest of it, if it has any.
        positions: [BLOCK_M], positions of the queries in their row.
        begin: A multiple of BLOCK_N.
        block_table: Pointer to the row's first block.
        unit: Factor that turns a product into an exponent of 2.

    Returns:
        The sums, peaks and totals, as `states` and `peaks_totals` hold them.
    """
    dims, rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        stored = keys < end_key
        pages = tl.load(block_table + keys // BLOCK_SIZE, mask=stored, other=0)
        vectors = (
            kv_cache + ((pages * BLOCK_SIZE + keys % BLOCK_SIZE).to(tl.int64) * (VALUE_DIM + REST))[:, None]
        )
        values = tl.load(
            vectors + dims[None, :], mask=stored[:, None] & (dims < VALUE_DIM)[None, :], other=0.0
        ).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(values), input_precision="ieee")
        if REST > 0:
            rest_keys = tl.load(
                vectors + VALUE_DIM + rest[None, :], mask=stored[:, None] & (rest < REST)[None, :], other=0.0
            ).to(queries.dtype)
            scores = tl.dot(rest_queries, tl.trans(rest_keys), scores, input_precision="ieee")
        scores = tl.where(keys[None, :] <= positions[:, None], scores * unit, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen no key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        acc = tl.dot(weights.to(queries.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=_OF_A_STEP)
def _fold_parts(
    query_starts, seq_lens, num_rows, out, states, peaks_totals, first_part, num_slots,
    ONE_QUERY: tl.constexpr, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    FOLDED: tl.constexpr,
):  # fmt: skip
    """Fold the parts of some queries of a tile with several: those in the slots into those folded before.

    Args:
        num_slots: Number of the slot, after those of parts, that holds what is folded so far.
    """
    _, first_position, end_key, to_token = _find_tile(
        query_starts, seq_lens, num_rows, ONE_QUERY, TILE_TOKENS, ROWS
    )
    _, num_parts = _find_parts(end_key, ONE_QUERY, BLOCK_N)
    in_tile = tl.program_id(2) * FOLDED + tl.arange(0, FOLDED)
    positions, heads, present = _find_queries(
        in_tile, first_position, end_key, NUM_HEADS, TILE_HEADS, TILE_TOKENS
    )
    dims = tl.arange(0, BLOCK_V)
    inside = present[:, None] & (dims < VALUE_DIM)[None, :]
    if (num_parts > 1) & (first_part < num_parts):
        folded, folded_sums = _find_sums(states, peaks_totals, num_slots, in_tile, dims, VALUE_DIM, BLOCK_M)
        acc = tl.zeros([FOLDED, BLOCK_V], tl.float32)
        peak = tl.full([FOLDED], float("-inf"), tl.float32)
        total = tl.zeros([FOLDED], tl.float32)
        if first_part > 0:
            acc = tl.load(folded, mask=inside, other=0.0)
            peak = tl.load(folded_sums)
            total = tl.load(folded_sums + BLOCK_M)
        for slot in range(tl.minimum(num_parts - first_part, num_slots)):
            state, sums = _find_sums(states, peaks_totals, slot, in_tile, dims, VALUE_DIM, BLOCK_M)
            later_peak = tl.load(sums)
            new_peak = tl.maximum(peak, later_peak)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shrink, later_shrink = tl.exp2(peak - base), tl.exp2(later_peak - base)
            # products are added by `fma`, so that the compiler has no choice of rounding
            acc = tl.fma(tl.load(state, mask=inside, other=0.0), later_shrink[:, None], acc * shrink[:, None])
            total = tl.fma(tl.load(sums + BLOCK_M), later_shrink, total * shrink)
            peak = new_peak
        if first_part + num_slots < num_parts:
            tl.store(folded, acc, mask=inside)
            tl.store(folded_sums, peak)
            tl.store(folded_sums + BLOCK_M, total)
        else:
            token_numbers = (positions + to_token).to(tl.int64)
            _store_result(out, acc, total, token_numbers, heads, dims, inside, NUM_HEADS, VALUE_DIM)


@triton.jit
def _find_tile(
    query_starts, seq_lens, num_rows, ONE_QUERY: tl.constexpr, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Find the tile of queries that this program is for.

    Returns:
        Its row; the position of its first query; the end of its queries' positions, which is also the end of the keys
        that they see; and the number to add to a position to get the token.
    """
    rows = tl.arange(0, ROWS)
    query_lens = tl.load(query_starts + rows + 1, mask=rows < num_rows, other=0) - tl.load(
        query_starts + rows, mask=rows < num_rows, other=0
    )
    if ONE_QUERY:
        counts = (query_lens == 1).to(tl.int32)
    else:
        counts = tl.where(query_lens > 1, tl.cdiv(query_lens, TILE_TOKENS), 0)
    # the last tiles of a prompt see the most keys: begun first, they do not keep the device waiting at the end
    row, tile = locate(counts, tl.num_programs(0) - 1 - tl.program_id(0), ROWS)
    first_token = tl.load(query_starts + row)
    seq_len = tl.load(seq_lens + row)
    row_position = seq_len - (tl.load(query_starts + row + 1) - first_token)
    first_position = row_position + tile * TILE_TOKENS
    return row, first_position, tl.minimum(first_position + TILE_TOKENS, seq_len), first_token - row_position


@triton.jit
def _find_parts(end_key, ONE_QUERY: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of keys of a part, a multiple of BLOCK_N, and the number of parts of a tile's keys."""
    if ONE_QUERY:
        part_keys = tl.maximum(tl.cdiv(tl.cdiv(end_key, BLOCK_N), _MAX_PARTS) * BLOCK_N, _MIN_PART)
    else:
        part_keys = end_key * 0 + _PROMPT_PART
    return part_keys, tl.cdiv(end_key, part_keys)


@triton.jit
def _find_queries(
    in_tile, first_position, end_key, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr
):  # fmt: skip
    """Return positions and heads of some rows of a tile, and whether there is such a query.

    A row of the tile is a token and a head. Rows that are left if TILE_HEADS does not divide BLOCK_M have no token, and
    those of the last block of heads may have no head.
    """
    positions = first_position + in_tile // TILE_HEADS
    heads = tl.program_id(1) * TILE_HEADS + in_tile % TILE_HEADS
    return (
        positions,
        heads,
        (in_tile < TILE_TOKENS * TILE_HEADS) & (positions < end_key) & (heads < NUM_HEADS),
    )


@triton.jit
def _find_sums(states, peaks_totals, slot, in_tile, dims, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the addresses of sums and peaks of some rows of this program's tile; totals are BLOCK_M further."""
    tile = (slot * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    place = tile * tl.num_programs(1) + tl.program_id(1)
    rows = place * BLOCK_M + in_tile
    return states + (rows * VALUE_DIM)[:, None] + dims[None, :], peaks_totals + (place * BLOCK_M + rows)


@triton.jit
def _store_result(
    out, acc, total, token_numbers, heads, dims, inside, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr
):
    vectors = token_numbers * NUM_HEADS + heads
    values = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (vectors * VALUE_DIM)[:, None] + dims[None, :], values, mask=inside)
