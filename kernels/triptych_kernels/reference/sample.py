"""Choosing the next token, row by row and token by token in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.reference.philox import token_word


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    token_ids = []
    for row in range(len(logits)):
        values = [float(value) for value in logits[row]]
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
    """The token ids that min_p, then top_k, then top_p leave; equal logits stay or go together."""
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
    """One token's noise."""
    return -math.log(-math.log((token_word(seed, position, token_id) + 0.5) / 2**32))
