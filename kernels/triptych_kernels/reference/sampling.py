"""Sampling row by row and token by token in float64, with Philox in Python integers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns, TokenMasks

MASK32 = 0xFFFFFFFF
NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, scaled to 2^32

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Return four u32 for a counter of four u32 and a key of two.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0 = (k0 + KEY_INCREMENTS[0]) & MASK32
        k1 = (k1 + KEY_INCREMENTS[1]) & MASK32
    return c0, c1, c2, c3


def token_word(seed: int, position: int, token_id: int) -> int:
    """Return the u32 of one token at one position under one seed.

    Args:
        seed: A u64, or the int64 with its bits.
        position: Position of the token to be sampled in its sequence.
    """
    counter = (position & MASK32, (position >> 32) & MASK32, token_id // 4, 0)
    return philox4x32(counter, (seed & MASK32, (seed >> 32) & MASK32))[token_id % 4]


def process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed: TokenColumns | None,
    banned: TokenColumns | None,
    biases: BiasColumns | None,
    penalties: PenaltyColumns | None,
) -> Tensor:
    table = logits[rows].tolist()
    if allowed is not None:
        entries = set(zip(allowed.rows.tolist(), allowed.token_ids.tolist(), strict=True))
        for row in {row for row, _ in entries}:
            table[row] = [value if (row, t) in entries else -math.inf for t, value in enumerate(table[row])]
    if banned is not None:
        for row, token_id in zip(banned.rows.tolist(), banned.token_ids.tolist(), strict=True):
            table[row][token_id] = -math.inf
    if biases is not None:
        columns = (biases.rows.tolist(), biases.token_ids.tolist(), biases.biases.tolist())
        for row, token_id, bias in zip(*columns, strict=True):
            table[row][token_id] += bias
    if penalties is not None:
        columns = (penalties.rows.tolist(), penalties.token_ids.tolist(), penalties.output_counts.tolist())
        for row, token_id, count in zip(*columns, strict=True):
            value, repetition = table[row][token_id], penalties.repetition[row].item()
            value = value / repetition if value > 0 else value * repetition
            if count > 0:
                value -= penalties.frequency[row].item() * count + penalties.presence[row].item()
            table[row][token_id] = value
    return torch.tensor(table, dtype=torch.float32).view(len(rows), logits.shape[1])


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
    token_ids = []
    logits = logits if rows is None else logits[rows]
    for row in range(len(logits)):
        values = [float(value) for value in logits[row]]
        if masks is not None and (mask := int(masks.rows[row])) >= 0:
            words = [word & MASK32 for word in masks.words[mask].tolist()]
            values = [v if words[t // 32] >> t % 32 & 1 else -math.inf for t, v in enumerate(values)]
        if any(math.isnan(value) for value in values) or math.isinf(max(values)):
            token_ids.append(-1)
            continue
        if temperature[row] == 0:
            token_ids.append(values.index(max(values)))
            continue
        scaled = [value / float(temperature[row]) for value in values]
        kept = kept_tokens(scaled, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        scores = {t: scaled[t] + gumbel(int(seeds[row]), int(positions[row]), t) for t in kept}
        token_ids.append(max(scores, key=lambda t: scores[t]))
    return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)


def kept_tokens(scaled: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the token ids that min_p, then top_k, then top_p keep; equal logits are kept or dropped together."""
    best = max(scaled)
    kept = {t for t, value in enumerate(scaled) if math.exp(value - best) >= min_p}
    if 0 < top_k < len(kept):
        kth_largest = sorted((scaled[t] for t in kept), reverse=True)[top_k - 1]
        kept = {t for t in kept if scaled[t] >= kth_largest}
    if top_p < 1.0:
        total = math.fsum(math.exp(scaled[t] - best) for t in kept)
        mass = 0.0
        for t in sorted(kept, key=lambda t: scaled[t], reverse=True):
            mass += math.exp(scaled[t] - best) / total
            if mass >= top_p:
                kept = {other for other in kept if scaled[other] >= scaled[t]}
                break
    return kept


def gumbel(seed: int, position: int, token_id: int) -> float:
    """Return one token's noise."""
    return -math.log(-math.log((token_word(seed, position, token_id) + 0.5) / 2**32))


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen_logprobs, ranks, top_ids, top_logprobs = [], [], [], []
    for row, token_id in zip(logits[rows].tolist(), token_ids.tolist(), strict=True):
        best = max(row)
        log_total = best + math.log(math.fsum(math.exp(value - best) for value in row))
        order = sorted(range(len(row)), key=lambda t: row[t], reverse=True)[:num_top]
        chosen_logprobs.append(row[token_id] - log_total)
        ranks.append(1 + sum(value > row[token_id] for value in row))
        top_ids.append(order)
        top_logprobs.append([row[t] - log_total for t in order])
    shape = (len(ranks), num_top)
    return (
        torch.tensor(chosen_logprobs, dtype=torch.float32),
        torch.tensor(ranks, dtype=torch.int64),
        torch.tensor(top_ids, dtype=torch.int64).view(shape),
        torch.tensor(top_logprobs, dtype=torch.float32).view(shape),
    )
