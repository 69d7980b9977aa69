"""Allowed and banned tokens, biases and penalties: rows are copied, then changed entry by entry, a launch per kind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns

_BLOCK = 4096  # logits that a program copies
_ENTRIES = 256  # that a program applies
_BIASES = 64  # fewer, as each is compared to all of its row

_OF_A_STEP = ("num_restricted", "num_entries")
"""Arguments that change from step to step: no kernel is compiled anew if they happen to be 1 or a multiple of 16."""


def process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed: TokenColumns | None,
    banned: TokenColumns | None,
    biases: BiasColumns | None,
    penalties: PenaltyColumns | None,
) -> Tensor:
    vocab_size = logits.shape[1]
    processed = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    if not processed.numel():
        return processed
    strides = logits.stride()
    restricted = None if allowed is None else allowed.rows.contiguous()
    _copy[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        logits, *strides, rows.contiguous(), processed, vocab_size,
        restricted, 0 if restricted is None else len(restricted), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    if allowed is not None and len(allowed.rows):
        _allow[_grid(allowed.rows, _ENTRIES)](
            logits, *strides, rows.contiguous(), processed, vocab_size,
            restricted, allowed.token_ids.contiguous(), len(allowed.rows), BLOCK=_ENTRIES,
        )  # fmt: skip
    if banned is not None and len(banned.rows):
        _ban[_grid(banned.rows, _ENTRIES)](
            processed, vocab_size, banned.rows.contiguous(), banned.token_ids.contiguous(), len(banned.rows),
            BLOCK=_ENTRIES,
        )  # fmt: skip
    if biases is not None and len(biases.rows):
        _bias[_grid(biases.rows, _BIASES)](
            processed, vocab_size, biases.rows.contiguous(), biases.token_ids.contiguous(),
            biases.biases.contiguous(), len(biases.rows), BLOCK=_BIASES, num_warps=2,
        )  # fmt: skip
    if penalties is not None and len(penalties.rows):
        _penalize[_grid(penalties.rows, _ENTRIES)](
            processed, vocab_size, penalties.rows.contiguous(), penalties.token_ids.contiguous(),
            penalties.output_counts.contiguous(), penalties.presence.contiguous(),
            penalties.frequency.contiguous(), penalties.repetition.contiguous(), len(penalties.rows),
            BLOCK=_ENTRIES,
        )  # fmt: skip
    return processed


def _grid(entries: Tensor, block: int) -> tuple[int]:
    return (triton.cdiv(len(entries), block),)


@triton.jit
def _first_at_least(rows, num_entries, row):
    """Return the index of the first of the ascending `rows` that is at least `row`, or `num_entries` if none is."""
    low, high = 0, num_entries
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(rows + middle) < row
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit(do_not_specialize=_OF_A_STEP)
def _copy(
    logits, row_stride, token_stride, logits_rows, processed, vocab_size,
    restricted, num_restricted, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows; those that `restricted` names become -inf."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    source = logits + tl.load(logits_rows + row) * row_stride
    x = tl.load(source + token.to(tl.int64) * token_stride, mask=inside)
    if restricted is not None:
        entry = _first_at_least(restricted, num_restricted, row)
        named = tl.load(restricted + entry, mask=entry < num_restricted, other=-1) == row
        x = tl.where(named, -float("inf"), x)
    tl.store(processed + row * vocab_size + token, x, mask=inside)


@triton.jit
def _entries(rows, token_ids, num_entries, vocab_size, BLOCK: tl.constexpr):
    """Return the numbers of a program's entries, whether they exist, their rows, and their offsets in the result."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = tl.load(rows + entry, mask=inside, other=0)
    return entry, inside, row, row * vocab_size + tl.load(token_ids + entry, mask=inside, other=0)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _allow(
    logits, row_stride, token_stride, logits_rows, processed, vocab_size,
    rows, token_ids, num_entries, BLOCK: tl.constexpr,
):  # fmt: skip
    _, inside, row, place = _entries(rows, token_ids, num_entries, vocab_size, BLOCK)
    token = place - row * vocab_size
    source = logits + tl.load(logits_rows + row, mask=inside, other=0) * row_stride + token * token_stride
    tl.store(processed + place, tl.load(source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _ban(processed, vocab_size, rows, token_ids, num_entries, BLOCK: tl.constexpr):
    _, inside, _, place = _entries(rows, token_ids, num_entries, vocab_size, BLOCK)
    tl.store(processed + place, tl.full((BLOCK,), -float("inf"), tl.float32), mask=inside)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _bias(processed, vocab_size, rows, token_ids, biases, num_entries, BLOCK: tl.constexpr):
    """Add biases; the first of the entries of one logit adds all of them, one after the other."""
    entry, inside, row, place = _entries(rows, token_ids, num_entries, vocab_size, BLOCK)
    x = tl.load(processed + place, mask=inside, other=0.0)
    is_first = inside
    begin = _first_at_least(rows, num_entries, tl.min(tl.where(inside, row, 2**62)))
    end = _first_at_least(rows, num_entries, tl.max(row) + 1)
    for other in range(begin, end):
        other_place = tl.load(rows + other) * vocab_size + tl.load(token_ids + other)
        x = tl.where(place == other_place, x + tl.load(biases + other), x)
        is_first = is_first & ((place != other_place) | (other >= entry))
    # a later entry of the same logit may have read what the first has changed by now, and writes nothing
    tl.store(processed + place, x, mask=is_first)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _penalize(
    processed, vocab_size, rows, token_ids, output_counts, presence, frequency, repetition,
    num_entries, BLOCK: tl.constexpr,
):  # fmt: skip
    entry, inside, row, place = _entries(rows, token_ids, num_entries, vocab_size, BLOCK)
    x = tl.load(processed + place, mask=inside, other=0.0)
    penalty = tl.load(repetition + row, mask=inside, other=1.0)
    count = tl.load(output_counts + entry, mask=inside, other=0)
    x = tl.where(x > 0.0, x / penalty, x * penalty)
    per_use = tl.load(frequency + row, mask=inside, other=0.0)
    once = tl.load(presence + row, mask=inside, other=0.0)
    x = tl.where(count > 0, x - per_use * count.to(tl.float32) - once, x)
    tl.store(processed + place, x, mask=inside)
