"""Gathers what some of a step's rows ask of their logits into the columns that `process_logits` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.sampling.batch import to_device
from services.worker.sampling.params import SamplingColumns, TokenHistory
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LogitChanges:
    """The arguments of `process_logits` for one step; the columns count in the rows that change."""

    rows: I64
    """[num_changed] rows of the logits, ascending."""
    allowed: TokenColumns | None
    banned: TokenColumns | None
    biases: BiasColumns | None
    penalties: PenaltyColumns | None


def gather_changes(
    columns: SamplingColumns, history: TokenHistory, slots: I64, device: torch.device
) -> LogitChanges | None:
    """What the rows of these slots, [num_rows] in logits order, ask; None in the common case."""
    num_output = history.num_known[slots] - history.num_prompt[slots]
    below_min_tokens = num_output < columns.min_tokens[slots]
    penalized = columns.has_penalties[slots]
    restricted = columns.restricts[slots]
    changed = below_min_tokens | penalized | restricted
    if not changed.any():
        return None
    rows = np.flatnonzero(changed)
    slots, below_min_tokens = slots[rows], below_min_tokens[rows]
    penalized, restricted = penalized[rows], restricted[rows]
    slot_of_row = slots.tolist()
    restricted_rows = np.flatnonzero(restricted).tolist()
    return LogitChanges(
        rows=rows,
        allowed=_token_columns(
            {row: columns.slot_to_allowed_ids.get(slot_of_row[row]) for row in restricted_rows}, device
        ),
        banned=_token_columns(
            {
                row: columns.slot_to_end_ids[slot_of_row[row]]
                for row in np.flatnonzero(below_min_tokens).tolist()
            },
            device,
        ),
        biases=_bias_columns(columns, slot_of_row, restricted_rows, device),
        penalties=_penalty_columns(columns, history, slots, np.flatnonzero(penalized).tolist(), device),
    )


def _token_columns(row_to_ids: dict[int, I64 | None], device: torch.device) -> TokenColumns | None:
    entries = [(row, ids) for row, ids in row_to_ids.items() if ids is not None]
    if not entries:
        return None
    return TokenColumns(rows=_rows(entries, device), token_ids=_joined([ids for _, ids in entries], device))


def _bias_columns(
    columns: SamplingColumns, slot_of_row: Sequence[int], rows: Sequence[int], device: torch.device
) -> BiasColumns | None:
    entries = [
        (row, bias) for row in rows if (bias := columns.slot_to_bias.get(slot_of_row[row])) is not None
    ]
    if not entries:
        return None
    return BiasColumns(
        rows=_rows([(row, bias.token_ids) for row, bias in entries], device),
        token_ids=_joined([bias.token_ids for _, bias in entries], device),
        biases=_joined([bias.biases for _, bias in entries], device),
    )


def _penalty_columns(
    columns: SamplingColumns, history: TokenHistory, slots: I64, rows: Sequence[int], device: torch.device
) -> PenaltyColumns | None:
    if not rows:
        return None
    counted = []
    for row in rows:
        slot = int(slots[row])
        counts = columns.slot_to_counts[slot]
        counts.count(history.token_ids[slot, : history.num_known[slot]], int(history.num_prompt[slot]))
        counted.append((row, counts))
    return PenaltyColumns(
        rows=_rows([(row, counts.token_ids) for row, counts in counted], device),
        token_ids=_joined([counts.token_ids for _, counts in counted], device),
        output_counts=_joined([counts.output_counts for _, counts in counted], device),
        presence=to_device(columns.presence_penalty[slots], device),
        frequency=to_device(columns.frequency_penalty[slots], device),
        repetition=to_device(columns.repetition_penalty[slots], device),
    )


def _rows(entries: Sequence[tuple[int, I64]], device: torch.device) -> torch.Tensor:
    """Each row's number, as often as it has token ids."""
    rows = np.repeat([row for row, _ in entries], [ids.size for _, ids in entries])
    return to_device(rows, device)


def _joined(parts: Sequence[NDArray[np.int64] | NDArray[np.float32]], device: torch.device) -> torch.Tensor:
    return to_device(np.concatenate(parts), device)
