"""`logit_bias`: numbers that are added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.types.sampling import SamplingParams
from triptych_kernels.logit_index import BiasColumns
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
    joined,
    row_column,
)
from triptych_services.worker.sampling.params import F32, LogitChange


class LogitBias:
    """A `FusedProcessor`."""

    operand = "biases"
    needs_history = False
    fault = None

    def __init__(self, max_num_seqs: int) -> None:
        self._biases: SlotValues[tuple[I64, F32]] = SlotValues(max_num_seqs)
        """Token ids and what is added to their logits, parallel."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        if not params.logit_bias:
            return LogitChange.NEVER
        token_ids, biases = zip(*params.logit_bias, strict=True)
        self._biases[slot] = np.array(token_ids, np.int64), np.array(biases, np.float32)
        return LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._biases.discard(slot)

    def find_rows(self, slots: I64) -> Flags | None:
        return self._biases.find_rows(slots)

    def columns(self, changed: ChangedRows, own: Sequence[OwnRow]) -> BiasColumns:
        ids, biases = zip(*(self._biases[slot] for _, slot in own), strict=True)
        device = changed.device
        return BiasColumns(row_column(own, ids, device), joined(ids, device), joined(biases, device))
