"""`bad_words`: a token is masked where it would complete one of some sequences in the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
    token_columns,
)
from triptych_services.worker.sampling.params import NOTHING_ALLOWED, LogitChange, TokenHistory


class BadWords:
    """A `DirectProcessor`."""

    needs_history = True
    fault = NOTHING_ALLOWED

    def __init__(self, max_num_seqs: int, *, history: TokenHistory) -> None:
        self._history = history
        self._sequences: SlotValues[_Sequences] = SlotValues(max_num_seqs)

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        if not params.bad_words:
            return LogitChange.NEVER
        sequences = [each for each in params.bad_words if not isinstance(each, str)]
        assert len(sequences) == len(params.bad_words), "the frontend has tokenized them"
        self._sequences[slot] = _Sequences(sequences)
        return LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._sequences.discard(slot)

    def find_rows(self, slots: I64) -> Flags | None:
        return self._sequences.find_rows(slots)

    def apply(self, logits: Tensor, changed: ChangedRows, own: Sequence[OwnRow]) -> Mapping[int, RowError]:
        history = self._history
        banned = [
            self._sequences[slot].find_last_ids(
                history.token_ids[slot, history.num_prompt[slot] : history.num_known[slot]]
            )
            for _, slot in own
        ]
        entries = token_columns(own, banned, changed.device)
        logits.index_put_((entries.rows, entries.token_ids), logits.new_full((), -torch.inf))
        return {}


class _Sequences:
    """The sequences of one request, by what comes before their last tokens.

    a b c     2 -> {a b: [c, d]}
    a b d     0 -> {: [e]}
    e
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """
        Args:
            sequences: Token ids, at least one each.
        """
        self._last_ids: dict[int, dict[bytes, list[int]]] = {}
        """Length of a prefix -> its ids as bytes -> the last ids of the sequences that begin with it."""
        for *prefix, last_id in sequences:
            by_prefix = self._last_ids.setdefault(len(prefix), {})
            by_prefix.setdefault(np.array(prefix, np.int32).tobytes(), []).append(last_id)

    def find_last_ids(self, output: NDArray[np.int32]) -> I64:
        """Return the tokens that would complete a sequence.

        Args:
            output: [num_output]
        """
        found = list[int]()
        for length, by_prefix in self._last_ids.items():
            if length <= output.size:
                found += by_prefix.get(output[output.size - length :].tobytes(), ())
        return np.array(found, np.int64)
