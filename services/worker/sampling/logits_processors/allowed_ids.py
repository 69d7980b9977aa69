"""`allowed_token_ids`: every other token is masked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.types.sampling import SamplingParams
from triptych_kernels.logit_index import TokenColumns
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
    token_columns,
)
from triptych_services.worker.sampling.params import NOTHING_ALLOWED, LogitChange


class AllowedIds:
    """A `FusedProcessor`."""

    operand = "allowed"
    needs_history = False
    fault = NOTHING_ALLOWED

    def __init__(self, max_num_seqs: int) -> None:
        self._ids: SlotValues[I64] = SlotValues(max_num_seqs)

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        if not params.allowed_token_ids:
            return LogitChange.NEVER
        self._ids[slot] = np.unique(np.array(params.allowed_token_ids, np.int64))
        return LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._ids.discard(slot)

    def find_rows(self, slots: I64) -> Flags | None:
        return self._ids.find_rows(slots)

    def columns(self, changed: ChangedRows, own: Sequence[OwnRow]) -> TokenColumns:
        return token_columns(own, [self._ids[slot] for _, slot in own], changed.device)
