"""Presence, frequency and repetition penalties: tokens of the prompt and the output become less likely."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from triptych.types.sampling import SAMPLING_FIELDS, SamplingParams
from triptych_kernels.logit_index import PenaltyColumns
from triptych_services.worker.sampling.batch import to_device
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
    joined,
    row_column,
)
from triptych_services.worker.sampling.params import F32, LogitChange, TokenHistory

_STRENGTHS = {
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
    "repetition": "repetition_penalty",
}
"""Column of `PenaltyColumns` -> sampling field."""
_strengths_of = attrgetter(*_STRENGTHS.values())
_NEUTRAL = _strengths_of(SamplingParams())
_FIRST_CAPACITY = 64  # distinct tokens; doubles when full


class Penalties:
    """A `FusedProcessor`."""

    operand = "penalties"
    needs_history = True
    fault = None  # finite logits stay finite within the limits of its fields

    def __init__(self, max_num_seqs: int, *, history: TokenHistory) -> None:
        self._history = history
        self._counts: SlotValues[TokenCounts] = SlotValues(max_num_seqs)
        self._strengths: dict[str, F32] = {
            column: np.full(max_num_seqs, SAMPLING_FIELDS[name].default, np.float32)
            for column, name in _STRENGTHS.items()
        }
        """Each [max_num_seqs]."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        strengths = _strengths_of(params)
        for values, strength in zip(self._strengths.values(), strengths, strict=True):
            values[slot] = strength
        if strengths == _NEUTRAL:
            return LogitChange.NEVER
        # the others look at the output only, and a long prompt would be an entry per token in every step
        self._counts[slot] = TokenCounts(counts_prompt=params.repetition_penalty != 1.0)
        return LogitChange.ALWAYS

    def leave(self, slot: int) -> None:
        self._counts.discard(slot)

    def find_rows(self, slots: I64) -> Flags | None:
        return self._counts.find_rows(slots)

    def columns(self, changed: ChangedRows, own: Sequence[OwnRow]) -> PenaltyColumns:
        history, device = self._history, changed.device
        counted = []
        for _, slot in own:
            counts = self._counts[slot]
            counts.count(history.token_ids[slot, : history.num_known[slot]], int(history.num_prompt[slot]))
            counted.append(counts)
        ids = [counts.token_ids for counts in counted]
        strengths = {
            column: to_device(values[changed.slots], device) for column, values in self._strengths.items()
        }
        return PenaltyColumns(
            rows=row_column(own, ids, device),
            token_ids=joined(ids, device),
            output_counts=joined([counts.output_counts for counts in counted], device),
            **strengths,
        )


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output.

    Counting anew in every step would cost a sort of the whole sequence; this costs one look-up per new token.
    """

    def __init__(self, *, counts_prompt: bool = True) -> None:
        """`counts_prompt`: Whether tokens that are only in the prompt count."""
        self._counts_prompt = counts_prompt
        self._token_ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._output_counts = np.zeros(_FIRST_CAPACITY, np.int64)
        self._id_to_place: dict[int, int] = {}
        self._num_counted = 0

    @property
    def token_ids(self) -> I64:
        """[distinct], in order of first appearance; a view, valid until the next `count`."""
        return self._token_ids[: len(self._id_to_place)]

    @property
    def output_counts(self) -> I64:
        """[distinct], parallel to `token_ids`; 0 for tokens that are only in the prompt."""
        return self._output_counts[: len(self._id_to_place)]

    def count(self, sequence: NDArray[np.integer], num_prompt: int) -> None:
        """Count the tokens that came to `sequence`, [num_known] prompt and output, since the last call."""
        if sequence.size < num_prompt:  # nothing is chosen yet
            return
        if self._num_counted < num_prompt:
            self._skip_prompt(sequence[:num_prompt])
        for position, token_id in enumerate(sequence[self._num_counted :].tolist(), self._num_counted):
            place = self._id_to_place.setdefault(token_id, len(self._id_to_place))
            if place == self._token_ids.size:
                self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
                self._output_counts = np.concatenate(
                    (self._output_counts, np.zeros_like(self._output_counts))
                )
            self._token_ids[place] = token_id
            self._output_counts[place] += position >= num_prompt
        self._num_counted = sequence.size

    def _skip_prompt(self, prompt: NDArray[np.integer]) -> None:
        """Take in a whole prompt at once, without a look-up per token."""
        self._num_counted = prompt.size
        if not self._counts_prompt:
            return
        distinct, first_places = np.unique(prompt, return_index=True)
        token_ids = distinct[np.argsort(first_places)].astype(np.int64)
        capacity = max(self._token_ids.size, 2 * token_ids.size)
        self._token_ids, self._output_counts = np.empty(capacity, np.int64), np.zeros(capacity, np.int64)
        self._token_ids[: token_ids.size] = token_ids
        self._id_to_place = {token_id: place for place, token_id in enumerate(token_ids.tolist())}
