"""Sampling by the native kernels: no sorting, and noise only for tokens that can win."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns, TokenMasks

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
        logits=logits, stride=logits.stride(0), vocab_size=logits.shape[1],
        logits_rows=rows.contiguous(), processed=processed,
        **_entries("allowed", allowed), **_entries("banned", banned),
        **_entries("biased", biases), **_columns(biases, "biases"),
        **_entries("penalized", penalties),
        **_columns(penalties, "output_counts", "presence", "frequency", "repetition"),
    )  # fmt: skip
    return processed


def _entries(name: str, columns: Columns | None) -> dict[str, Operand]:
    """Return the operands of an `EntryRows` called `name` and of the token ids beside it; null without columns."""
    rows, count, token_ids = None, 0, None
    if columns is not None:
        rows, count, token_ids = columns.rows.contiguous(), len(columns.rows), columns.token_ids.contiguous()
    return {f"{name}_rows": rows, f"{name}_count": count, f"{name}_ids": token_ids}


def _columns(columns: Columns | None, *names: str) -> dict[str, Operand]:
    """Return these fields of `columns` as operands; null without columns."""
    return {name: None if columns is None else getattr(columns, name).contiguous() for name in names}


def sample(logits: Tensor, *, rows: Tensor | None, masks: TokenMasks | None, **columns: Tensor) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    each = logits if rows is None else rows
    token_ids = torch.empty(len(each), dtype=torch.int64, device=logits.device)
    launch(
        "sample", each,
        logits=logits, stride=logits.stride(0), vocab_size=logits.shape[1],
        logits_rows=None if rows is None else rows.contiguous(),
        mask_words=None if masks is None else masks.words.contiguous(),
        num_words=0 if masks is None else masks.words.shape[1],
        mask_rows=None if masks is None else masks.rows.contiguous(),
        **{name: column.contiguous() for name, column in columns.items()}, token_ids=token_ids,
    )  # fmt: skip
    return token_ids


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = len(rows)
    chosen_logprobs = torch.empty(num_rows)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    top_logprobs = torch.empty(num_rows, num_top)
    launch(
        "token_logprobs", rows,
        logits=logits, stride=logits.stride(0), vocab_size=logits.shape[1], logits_rows=rows.contiguous(),
        token_ids=token_ids.contiguous(), num_top=num_top, chosen_logprobs=chosen_logprobs, ranks=ranks,
        top_ids=top_ids, top_logprobs=top_logprobs,
    )  # fmt: skip
    return chosen_logprobs, ranks, top_ids, top_logprobs
