"""Log-probabilities by their definition in float64, with the vocabulary sorted."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
