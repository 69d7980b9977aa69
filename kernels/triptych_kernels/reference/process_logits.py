"""Allowed and banned tokens, biases and penalties, logit by logit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns


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
