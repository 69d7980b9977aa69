"""Sampling in two launches: one pass over the logits, then a look into the few that can be chosen.

    scan      a program per chunk of a row: its best token; without filters, the winner of its race; with filters, the
              maxima of groups, and the logits themselves if the row has a mask
    choose    a program per row: nothing more if greedy or without filters; else the threshold of its filters, see
              `select`, and the race of the tokens that reach it

The device distinguishes the rows: the host waits for nothing, and grids depend only on shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.logit_index import TokenMasks
from triptych_kernels.triton.sampling.race import NO_TOKEN, load_quads, race, rates
from triptych_kernels.triton.sampling.scan import (
    CHUNK,
    GROUP,
    LOWEST,
    best_of_chunks,
    is_usable,
    key_of,
    pack,
    packed_key,
    packed_token,
    store_group_maxima,
    usable_value,
    value_of,
)
from triptych_kernels.triton.sampling.select import (
    MASS_OF_BEST,
    MAX_GATHERED,
    TILE_GROUPS,
    bound_of_largest,
    find_threshold,
    list_groups,
    listed_quads,
    load_maxima,
    weigh,
)

_SCAN_WARPS = 8  # 16 tokens of a chunk for each thread
_CHOOSE_WARPS = 16  # 8 tokens of a tile, and the maxima of a large vocabulary, without spilling

_FIRST_GROUPS = tl.constexpr(256)  # looked into first for top_p: more than the nucleus of most rows
_NEGLIGIBLE = tl.constexpr(40.0)  # temperatures below the best: a million such tokens have a mass of 4e-12


def sample(
    logits: Tensor,
    *,
    rows: Tensor | None,
    masks: TokenMasks | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    num_rows, vocab_size = len(temperature), logits.shape[1]
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return token_ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p, seeds, positions)]
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    num_groups = num_chunks * CHUNK // GROUP
    chunk_best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
    chunk_mass = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    chunk_score = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=device)
    chunk_winner = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    group_maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    groups = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    gathered = torch.empty(num_rows, MAX_GATHERED, dtype=torch.int32, device=device)
    logits_rows = None if rows is None else rows.contiguous()
    mask_rows = words = masked = None
    if masks is not None:
        mask_rows, words = masks.rows.contiguous(), masks.words.contiguous()
        masked = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    _scan[(num_rows, num_chunks)](
        logits, logits.stride(0), vocab_size, logits_rows, mask_rows, words, masked, *columns,
        chunk_best, chunk_mass, chunk_score, chunk_winner, group_maxima,
        num_chunks, CHUNK=CHUNK, GROUP=GROUP, num_warps=_SCAN_WARPS,
    )  # fmt: skip
    _choose[(num_rows,)](
        logits, logits.stride(0), vocab_size, logits_rows, mask_rows, masked, *columns,
        chunk_best, chunk_mass, chunk_score, chunk_winner, group_maxima, groups, gathered, token_ids,
        num_chunks, num_groups,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks), NUM_GROUPS=triton.next_power_of_2(num_groups),
        GROUP=GROUP, TILE_GROUPS=TILE_GROUPS, MAX_GATHERED=MAX_GATHERED, num_warps=_CHOOSE_WARPS,
    )  # fmt: skip
    return token_ids


@triton.jit
def _is_filtered(top_k, top_p, min_p, vocab_size):
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _place_of(logits_rows, row):
    """Return the row of the logits that is sampled as `row`."""
    if logits_rows is not None:
        row = tl.load(logits_rows + row)
    return row


@triton.jit
def _scan(
    logits, stride, vocab_size, logits_rows, mask_rows, words, masked,
    temperatures, top_ks, top_ps, min_ps, seeds, positions,
    chunk_best, chunk_mass, chunk_score, chunk_winner, group_maxima,
    num_chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += _place_of(logits_rows, row) * stride
    quads = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    x = load_quads(logits, quads, vocab_size)
    token = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    if mask_rows is not None:
        mask = tl.load(mask_rows + row)
        is_masked = mask >= 0
        word = mask.to(tl.int64) * tl.cdiv(vocab_size, 32) + token // 32
        bits = tl.load(words + word, mask=is_masked & (token < vocab_size), other=-1)
        x = tl.where((bits >> (token % 32)) & 1 != 0, x, -float("inf"))
    best = tl.max(pack(key_of(x), token))
    out = row * num_chunks + chunk
    tl.store(chunk_best + out, best)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        top_p = tl.load(top_ps + row)
        if _is_filtered(tl.load(top_ks + row), top_p, tl.load(min_ps + row), vocab_size):
            store_group_maxima(group_maxima, x, row, chunk, num_chunks, CHUNK, GROUP)
            if mask_rows is not None:
                tl.store(masked + row * vocab_size + token, x, mask=is_masked & (token < vocab_size))
            if top_p < 1.0:
                best_logit = usable_value(packed_key(best), 0.0)
                tl.store(chunk_mass + out, tl.sum(rates(x, best_logit, temperature)))
        else:
            score, winner = race(
                logits, x, quads, LOWEST, temperature, tl.load(seeds + row), tl.load(positions + row)
            )
            tl.store(chunk_score + out, score)
            tl.store(chunk_winner + out, winner)


@triton.jit
def _choose(
    logits, stride, vocab_size, logits_rows, mask_rows, masked,
    temperatures, top_ks, top_ps, min_ps, seeds, positions,
    chunk_best, chunk_mass, chunk_score, chunk_winner, group_maxima, groups, gathered, token_ids,
    num_chunks, num_groups,
    NUM_CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr, MAX_GATHERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = best_of_chunks(chunk_best, row, num_chunks, NUM_CHUNKS)
    best_key = packed_key(best)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    token_id = packed_token(best)
    if not is_usable(best_key):
        token_id = -1
    elif temperature > 0.0:
        if _is_filtered(top_k, top_p, min_p, vocab_size):
            logits += _place_of(logits_rows, row) * stride
            if mask_rows is not None:
                logits = tl.where(tl.load(mask_rows + row) >= 0, masked + row * vocab_size, logits)
            groups += row * num_groups
            group_maxima += row * num_groups
            threshold = _threshold(
                logits, groups, gathered + row * MAX_GATHERED, group_maxima, num_groups, vocab_size,
                chunk_best + row * num_chunks, chunk_mass + row * num_chunks, num_chunks,
                best_key, temperature, top_k, top_p, min_p,
                NUM_CHUNKS, NUM_GROUPS, GROUP, TILE_GROUPS, MAX_GATHERED,
            )  # fmt: skip
            num_listed = list_groups(groups, group_maxima, num_groups, threshold, NUM_GROUPS)
            token_id = _race_listed(
                logits, groups, num_listed, vocab_size,
                threshold, temperature, tl.load(seeds + row), tl.load(positions + row),
                GROUP, TILE_GROUPS,
            )  # fmt: skip
        else:
            chunk = tl.arange(0, NUM_CHUNKS)
            here = chunk < num_chunks
            score = tl.load(chunk_score + row * num_chunks + chunk, mask=here, other=-float("inf"))
            winner = tl.load(chunk_winner + row * num_chunks + chunk, mask=here, other=NO_TOKEN)
            token_id = tl.min(tl.where(score == tl.max(score), winner, NO_TOKEN))
    tl.store(token_ids + row, token_id.to(tl.int64))


@triton.jit
def _threshold(
    logits, groups, gathered, group_maxima, num_groups, vocab_size, chunk_best, chunk_mass, num_chunks,
    best_key, temperature, top_k, top_p, min_p,
    NUM_CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr, MAX_GATHERED: tl.constexpr,
):  # fmt: skip
    """Return the smallest logit that all filters keep. Each keeps the largest: each bound is above the one before."""
    best = value_of(best_key)
    best_wide = best.to(tl.float64)
    threshold = tl.full((), LOWEST, tl.float32)
    if min_p > 0.0:
        distance = temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
        threshold = tl.maximum(best_wide + distance, LOWEST).to(tl.float32)
    for stage in range(2):  # top_k, top_p: one body, which is large
        by_mass = stage == 1
        if tl.where(by_mass, top_p < 1.0, (top_k > 0) & (top_k < vocab_size)):
            needed, num_first, lowest_bound = top_k.to(tl.int64), top_k, threshold
            if by_mass:
                total = _total_mass(
                    logits, groups, group_maxima, num_groups, vocab_size, chunk_best, chunk_mass, num_chunks,
                    threshold, best, temperature, NUM_CHUNKS, NUM_GROUPS, GROUP, TILE_GROUPS,
                )  # fmt: skip
                needed = tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
                num_first = tl.full((), _FIRST_GROUPS, tl.int32)
                negligible = tl.maximum(best_wide - _NEGLIGIBLE * temperature.to(tl.float64), LOWEST)
                lowest_bound = tl.maximum(threshold, negligible.to(tl.float32))
            keys = key_of(load_maxima(group_maxima, num_groups, NUM_GROUPS))
            likely = value_of(bound_of_largest(keys, num_first, num_first + num_first // 4))
            threshold = find_threshold(
                logits, groups, gathered, group_maxima, num_groups, vocab_size,
                tl.maximum(likely, lowest_bound), lowest_bound, needed, best_key, temperature, by_mass,
                NUM_GROUPS, TILE_GROUPS, GROUP, MAX_GATHERED,
            )  # fmt: skip
    return threshold


@triton.jit
def _total_mass(
    logits, groups, group_maxima, num_groups, vocab_size, chunk_best, chunk_mass, num_chunks,
    threshold, best, temperature,
    NUM_CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the int64 mass of the logits that reach the threshold; the mass of all is known from the scan."""
    chunk = tl.arange(0, NUM_CHUNKS)
    here = chunk < num_chunks
    chunk_logit = usable_value(packed_key(tl.load(chunk_best + chunk, mask=here, other=0)), best)
    mass = tl.load(chunk_mass + chunk, mask=here, other=0.0) * rates(chunk_logit, best, temperature)
    total = (tl.sum(mass.to(tl.float64)) * MASS_OF_BEST).to(tl.int64)
    if threshold > LOWEST:
        num_listed = list_groups(groups, group_maxima, num_groups, threshold, NUM_GROUPS)
        total, _, _ = weigh(
            logits, groups, num_listed, vocab_size, threshold, best, temperature, True, TILE_GROUPS, GROUP
        )
    return total


@triton.jit
def _race_listed(
    logits, groups, num_listed, vocab_size, threshold, temperature, seed, position,
    GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the winner among the tokens of the listed groups that reach the threshold."""
    best_score = tl.full((), -float("inf"), tl.float64)
    best_id = tl.full((), NO_TOKEN, tl.int32)
    for first in range(0, num_listed, TILE_GROUPS):
        quads = listed_quads(groups, first, num_listed, TILE_GROUPS, GROUP)
        x = load_quads(logits, quads, vocab_size)
        score, token_id = race(logits, x, quads, threshold, temperature, seed, position)
        # groups ascend, so of equals the first keeps its place
        best_id = tl.where(score > best_score, token_id, best_id)
        best_score = tl.maximum(score, best_score)
    return best_id
