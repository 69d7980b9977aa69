"""Steps of both kernels of paged attention: adding a row's keys to a softmax, and finding a program's row."""

from __future__ import annotations

import triton
import triton.language as tl

from triptych_kernels.attend_options import AttendOptions

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    acc, peak, total, query, positions, begin, end, first_key, end_key,
    kv_cache, kv_scales, block_table, kv_head, scale, unit, slopes,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the keys begin..end of one row, BLOCK_N at a time, to the running softmax of some queries.

    A tile begins at a multiple of BLOCK_N for any window and chunk of the row, so that sums over keys are always cut
    at the same places. exp2 takes the place of exp, and its factor is applied together with `scale`, see `score_unit`.

    Args:
        acc: [BLOCK_M, BLOCK_D] float32, sum of values times 2^(score - peak). Together with `peak` and `total` it is
            the state that is taken and returned, which begins as zeros and what `begin_softmax` returns.
        peak: [BLOCK_M] float32, the largest score so far.
        total: [BLOCK_M] float32, sum of 2^(score - peak).
        query: [BLOCK_M, BLOCK_D], zeros beyond HEAD_DIM.
        positions: [BLOCK_M], positions of the queries in their row.
        begin: A multiple of BLOCK_N.
        first_key: Begin of the keys that some query sees; `end_key` is their end. No other key is read.
        block_table: Pointer to the row's first block.
        unit: Factor that turns a score into an exponent of 2.
        slopes: [BLOCK_M] float32, those of ALiBi; or None.
        MASKED: Whether some query does not see some of the keys; otherwise nothing is compared.
    """
    dims = tl.arange(0, BLOCK_D)
    # Every key asks for its own page: the addresses of a tile are BLOCK_N numbers, which costs little, and any block
    # size is served alike. Pages are looked up one step ahead, because the compiler would otherwise spend a stage of
    # its pipeline on them and keep fewer keys on their way.
    keys = begin + tl.arange(0, BLOCK_N)
    pages = tl.load(block_table + keys // BLOCK_SIZE, mask=(keys >= first_key) & (keys < end_key), other=0)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        stored = (keys >= first_key) & (keys < end_key)
        inside = (dims < HEAD_DIM)[None, :]
        if MASKED:
            inside = stored[:, None] & inside
        vectors = (pages * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        later = keys + BLOCK_N
        pages = tl.load(
            block_table + later // BLOCK_SIZE, mask=(later >= first_key) & (later < end_key), other=0
        )
        key_addresses = kv_cache + (vectors.to(tl.int64) * HEAD_DIM)[:, None] + dims[None, :]
        value_addresses = key_addresses + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        if MASKED or HEAD_DIM < BLOCK_D:
            key_tile = tl.load(key_addresses, mask=inside, other=0.0)
        else:
            key_tile = tl.load(key_addresses)
        scores = tl.dot(query, tl.trans(key_tile.to(query.dtype)), input_precision="ieee")
        if kv_scales is not None:
            if MASKED:
                key_scales = tl.load(kv_scales + vectors, mask=stored, other=0.0)
            else:
                key_scales = tl.load(kv_scales + vectors)
            scores *= key_scales[None, :]
        scores = _change_scores(scores, keys, positions, scale, slopes, SOFT_CAP)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0 or CHUNK > 0:
                seen &= keys[None, :] >= first_seen(positions, WINDOW, CHUNK)[:, None]
            scores = tl.where(seen, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # a query that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak * unit) if MASKED else new_peak * unit
        weights = tl.exp2(scores * unit - base[:, None])
        shrink = tl.exp2(peak * unit - base)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak

        if MASKED or HEAD_DIM < BLOCK_D:
            value_tile = tl.load(value_addresses, mask=inside, other=0.0)
        else:
            value_tile = tl.load(value_addresses)
        if kv_scales is not None:
            if MASKED:
                value_scales = tl.load(
                    kv_scales + NUM_KV_HEADS * BLOCK_SIZE + vectors, mask=stored, other=0.0
                )
                weights = tl.where(seen, weights * value_scales[None, :], 0.0)  # 0 * NaN would be NaN
            else:
                weights *= tl.load(kv_scales + NUM_KV_HEADS * BLOCK_SIZE + vectors)[None, :]
        acc = tl.dot(
            weights.to(query.dtype), value_tile.to(query.dtype), acc * shrink[:, None], input_precision="ieee"
        )
    return acc, peak, total


def score_unit(options: AttendOptions) -> float:
    """Return the factor that turns a score of `attend_keys` into an exponent of 2.

    Scores stay products of query and key where they can, since this factor costs nothing: a multiplication and a
    subtraction are one instruction. Scores that a layer changes are exponents already.
    """
    return 1.0 if options.soft_cap or options.alibi is not None else options.scale * LOG2_E.value


@triton.jit
def _change_scores(scores, keys, positions, scale, slopes, SOFT_CAP: tl.constexpr):
    """Return scores [BLOCK_M, BLOCK_N], capped and moved by their distance if the layer does so."""
    if SOFT_CAP > 0.0:
        scores = _tanh(scores * (scale / SOFT_CAP)) * (SOFT_CAP * LOG2_E)
    elif slopes is not None:
        scores *= scale * LOG2_E
    if slopes is not None:
        scores += (slopes * LOG2_E)[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    return scores


@triton.jit
def _tanh(x):
    """Return tanh(x) with a relative error of 5e-7; near 0 by its series, where the quotient has a larger one."""
    size = tl.abs(x)
    shrink = tl.exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - shrink) / (1.0 + shrink)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(size < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that a query at `position` sees, of the shape and dtype of `position`."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def begin_softmax(sinks, heads, present, is_first, unit):
    """Return the peak and total of some queries before they see a key; see `attend_keys`.

    Args:
        sinks: Pointer to [num_heads] float32, or None.
        heads: [BLOCK_M], those of the queries.
        present: [BLOCK_M], whether there is such a query.
        is_first: Whether these are a row's first keys: its sink must count once.
    """
    peak = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=present, other=0.0) * (LOG2_E / unit)
        peak = tl.where(is_first, sink, peak)
        total = tl.where(is_first, total + 1.0, total)
    return peak, total


@triton.jit
def locate(counts, index, ROWS: tl.constexpr):
    """Return the row that item `index` belongs to, if row r has counts[r] items, and its number among that row's items.

    This scans all rows in registers instead of searching in memory. The items of all rows are numbered without gaps,
    so a launch has no idle programs, and the host need not know the number of items of a row.

    Args:
        counts: [ROWS] int32; `index` is below their sum.
    """
    ends = tl.cumsum(counts, 0)
    row = tl.sum((ends <= index).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, ROWS) < row, counts, 0), 0)
    return row, index - before
