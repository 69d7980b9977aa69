"""Allowed and banned tokens, biases and penalties on CPUs: each row copied once, then changed entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import Argument, launch
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns

Columns = TokenColumns | BiasColumns | PenaltyColumns


def process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed: TokenColumns | None,
    banned: TokenColumns | None,
    biases: BiasColumns | None,
    penalties: PenaltyColumns | None,
) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    processed = torch.empty(len(rows), logits.shape[1], device=logits.device)
    launch(
        "process_logits", rows,
        logits, logits.stride(0), logits.shape[1], rows.contiguous(), processed,
        *_entries(allowed),
        *_entries(banned),
        *_entries(biases), *_columns(biases, "biases"),
        *_entries(penalties), *_columns(penalties, "output_counts", "presence", "frequency", "repetition"),
    )  # fmt: skip
    return processed


def _entries(columns: Columns | None) -> tuple[Argument, ...]:
    """`EntryRows` and token ids."""
    if columns is None:
        return None, 0, None
    return columns.rows.contiguous(), len(columns.rows), columns.token_ids.contiguous()


def _columns(columns: Columns | None, *names: str) -> tuple[Argument, ...]:
    if columns is None:
        return (None,) * len(names)
    return tuple(getattr(columns, name).contiguous() for name in names)
