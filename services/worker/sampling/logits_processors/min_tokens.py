"""`min_tokens`: the tokens that end the output are masked until so many are out."""

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
from triptych_services.worker.sampling.params import LogitChange, TokenHistory


class MinTokens:
    """A `FusedProcessor`."""

    operand = "banned"
    needs_history = False  # the number of tokens is enough
    fault = None

    def __init__(self, max_num_seqs: int, *, eos_token_ids: Sequence[int], history: TokenHistory) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._history = history
        self._end_ids: SlotValues[I64] = SlotValues(max_num_seqs)
        """EOS and the request's stop ids."""
        self._min_tokens: I64 = np.zeros(max_num_seqs, np.int64)

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        self._min_tokens[slot] = params.min_tokens
        if not params.min_tokens:
            return LogitChange.NEVER
        end_ids = np.array((*self._eos_token_ids, *params.stop_token_ids), np.int64)
        self._end_ids[slot] = np.unique(end_ids)
        return LogitChange.SOMETIMES

    def leave(self, slot: int) -> None:
        self._min_tokens[slot] = 0
        self._end_ids.discard(slot)

    def find_rows(self, slots: I64) -> Flags | None:
        if not self._end_ids:
            return None
        num_output = self._history.num_known[slots] - self._history.num_prompt[slots]
        flags: Flags = num_output < self._min_tokens[slots]
        return flags if flags.any() else None

    def columns(self, changed: ChangedRows, own: Sequence[OwnRow]) -> TokenColumns:
        return token_columns(own, [self._end_ids[slot] for _, slot in own], changed.device)
