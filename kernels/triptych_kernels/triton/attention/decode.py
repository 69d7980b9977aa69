"""Attention of rows with one query: programs each read a split of a row's keys, and a second kernel combines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.triton.attention.plan import decode_tiles, num_sms, rows_block
from triptych_kernels.triton.attention.tile import attend_keys, begin_softmax, first_seen, locate, score_unit

_SPLIT_KEYS = 256
"""Fewest keys of a split: 128 KiB of keys and values in 16 bits at heads of 128. A program's start and its partial
result, 512 bytes a query head, are small beside that."""

_MAX_SPLITS = 128
"""Most splits of a row: with more, combining them would cost what the last few multiprocessors gain."""

_OF_A_STEP = ("block_tables_stride_0", "num_rows", "target_splits", "max_splits")
"""Arguments that change from step to step: no kernel is compiled anew if they happen to be 1 or a multiple of 16."""

_COMBINED = 8  # partial results that one step of the combination takes, 4 KiB at heads of 128


def attend_decodes(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    out: Tensor,
    *,
    kv_scales: Tensor | None,
    max_seq_len: int,
) -> None:
    """Attend from the rows that have one query; `out` keeps its content for the others.

    The splits of a row depend only on its own length, the number of key heads and the device, so it gives the same
    bits in any batch: at most so many splits that one row fills the device, each of at least _SPLIT_KEYS keys. The
    splits of all rows and key heads are numbered on the device and given to as many programs as it holds at once. So
    only the size of the scratch depends on `max_seq_len`, and a recorded launch serves rows of any length up to it.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        max_seq_len: Upper bound of the rows' numbers of keys.
    """
    num_rows = len(seq_lens)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    block_m = max(triton.next_power_of_2(num_heads // num_kv_heads), 16)
    tiles = decode_tiles(query, kv_cache.dtype, head_dim, block_m)
    num_programs = num_sms(query.device) * tiles.programs_per_sm
    target_splits = min(max(num_programs // num_kv_heads, 1), _MAX_SPLITS)
    max_keys = min(max_seq_len, options.max_keys + tiles.block_n) if options.max_keys else max_seq_len
    max_splits = min(target_splits, triton.cdiv(max_keys, _SPLIT_KEYS))
    partials = torch.empty(
        (num_rows, num_heads, max_splits, head_dim), dtype=torch.float32, device=query.device
    )
    log_totals = torch.empty((num_rows, num_heads, max_splits), dtype=torch.float32, device=query.device)
    constants = {
        "WINDOW": options.window, "CHUNK": options.chunk, "MIN_TILES": max(_SPLIT_KEYS // tiles.block_n, 1),
        "HEAD_DIM": head_dim, "BLOCK_N": tiles.block_n, "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
    }  # fmt: skip
    _attend_splits[(min(num_programs, num_rows * num_kv_heads * max_splits),)](
        query, query.stride(0), query.stride(1), kv_cache, kv_scales, block_tables, block_tables.stride(0),
        query_starts, seq_lens, num_rows, options.scale, score_unit(options), options.sinks, options.alibi,
        out, partials, log_totals, target_splits, max_splits, SOFT_CAP=float(options.soft_cap),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, BLOCK_SIZE=block_size,
        ROWS=rows_block(num_rows), BLOCK_M=block_m,
        **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if max_splits > 1:
        _combine_splits[(num_rows, num_heads)](
            query_starts, seq_lens, out, partials, log_totals, target_splits, max_splits,
            **constants, SPLITS=_COMBINED, num_warps=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=_OF_A_STEP)
def _attend_splits(
    query, query_stride_0, query_stride_1, kv_cache, kv_scales, block_tables, block_tables_stride_0,
    query_starts, seq_lens, num_rows, scale, unit, sinks, alibi, out, partials, log_totals, target_splits, max_splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, MIN_TILES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    first_tokens = tl.load(query_starts + rows, mask=rows < num_rows, other=0)
    next_tokens = tl.load(query_starts + rows + 1, mask=rows < num_rows, other=0)
    lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    num_splits = _num_splits(lens, target_splits, WINDOW, CHUNK, MIN_TILES, BLOCK_N)
    counts = tl.where(next_tokens - first_tokens == 1, num_splits, 0)
    # the key heads of a page are neighbours in memory, so neighbouring programs take them
    for item in range(tl.program_id(0), tl.sum(counts, 0) * NUM_KV_HEADS, tl.num_programs(0)):
        row, split = locate(counts, item // NUM_KV_HEADS, ROWS)
        kv_head = item % NUM_KV_HEADS
        seq_len = tl.load(seq_lens + row)
        token = tl.load(query_starts + row).to(tl.int64)
        first_key, first_tile, split_tiles, num_tiles = _cut(
            seq_len, target_splits, WINDOW, CHUNK, MIN_TILES, BLOCK_N
        )
        begin = (first_tile + split * split_tiles) * BLOCK_N
        end = tl.minimum(begin + split_tiles * BLOCK_N, seq_len)

        heads = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        inside = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        present = heads < GROUP
        heads += kv_head * GROUP
        peak, total = begin_softmax(sinks, heads, present, split == 0, unit)
        slopes = None
        if alibi is not None:
            slopes = tl.load(alibi + heads, mask=present, other=0.0)
        query_tile = tl.load(
            query + token * query_stride_0 + heads[:, None] * query_stride_1 + dims[None, :],
            mask=inside,
            other=0.0,
        )
        acc, peak, total = attend_keys(
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), peak, total,
            query_tile, tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1), begin, end, first_key, seq_len,
            kv_cache, kv_scales, block_tables + row.to(tl.int64) * block_tables_stride_0, kv_head, scale, unit, slopes,
            WINDOW, CHUNK, SOFT_CAP, True, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc /= total[:, None]
        if num_tiles <= split_tiles:
            vectors = token * (NUM_KV_HEADS * GROUP) + heads
            tl.store(
                out + (vectors * HEAD_DIM)[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside
            )
        else:
            vectors = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * max_splits + split
            tl.store(partials + (vectors * HEAD_DIM)[:, None] + dims[None, :], acc, mask=inside)
            log_total = peak * unit + tl.log2(total)
            tl.store(log_totals + vectors, log_total, mask=present)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _combine_splits(
    query_starts, seq_lens, out, partials, log_totals, target_splits, max_splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the partial results of a row and head by the sums of their weights, in the order of the keys."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_starts + row).to(tl.int64)
    num_splits = _num_splits(tl.load(seq_lens + row), target_splits, WINDOW, CHUNK, MIN_TILES, BLOCK_N)
    if tl.load(query_starts + row + 1) - token == 1 and num_splits > 1:
        dims = tl.arange(0, BLOCK_D)
        first = (row.to(tl.int64) * tl.num_programs(1) + head) * max_splits
        acc = tl.zeros([BLOCK_D], tl.float32)
        peak = float("-inf")
        total = 0.0
        for start in range(0, num_splits, SPLITS):
            splits = start + tl.arange(0, SPLITS)
            present = splits < num_splits
            parts = tl.load(
                partials + ((first + splits) * HEAD_DIM)[:, None] + dims[None, :],
                mask=present[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            logs = tl.load(log_totals + first + splits, mask=present, other=float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logs, 0))
            weights = tl.exp2(logs - new_peak)
            shrink = tl.exp2(peak - new_peak)
            acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            peak = new_peak
        address = out + (token * tl.num_programs(1) + head) * HEAD_DIM + dims
        tl.store(address, (acc / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _cut(
    seq_len, target_splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Split the keys of a row with one query.

    Returns:
        The first key that the query sees, its tile, the number of tiles of a split (the last one may have fewer), and
        the number of all tiles. There are at most target_splits splits, each of MIN_TILES tiles or more.
    """
    first_key = first_seen(seq_len - 1, WINDOW, CHUNK)
    first_tile = first_key // BLOCK_N
    num_tiles = tl.cdiv(seq_len, BLOCK_N) - first_tile
    return first_key, first_tile, tl.maximum(tl.cdiv(num_tiles, target_splits), MIN_TILES), num_tiles


@triton.jit
def _num_splits(
    seq_len, target_splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    _, _, split_tiles, num_tiles = _cut(seq_len, target_splits, WINDOW, CHUNK, MIN_TILES, BLOCK_N)
    return tl.cdiv(num_tiles, split_tiles)
