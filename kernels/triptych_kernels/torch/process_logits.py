"""Allowed and banned tokens, biases and penalties in plain torch, entry by entry."""

from __future__ import annotations

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
    processed = logits[rows]  # a copy
    if allowed is not None:
        kept = processed[allowed.rows, allowed.token_ids]
        processed[allowed.rows] = -torch.inf
        processed[allowed.rows, allowed.token_ids] = kept
    if banned is not None:
        processed[banned.rows, banned.token_ids] = -torch.inf
    if biases is not None:
        processed.index_put_((biases.rows, biases.token_ids), biases.biases, accumulate=True)
    if penalties is not None:
        _penalize(processed, penalties)
    return processed


def _penalize(logits: Tensor, penalties: PenaltyColumns) -> None:
    rows, counts = penalties.rows, penalties.output_counts
    entries = logits[rows, penalties.token_ids]
    repetition = penalties.repetition[rows]
    entries = torch.where(entries > 0, entries / repetition, entries * repetition)
    entries -= penalties.frequency[rows] * counts
    entries -= penalties.presence[rows] * (counts > 0)
    logits[rows, penalties.token_ids] = entries
