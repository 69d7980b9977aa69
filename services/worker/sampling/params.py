"""The sampling parameters of each live request, as columns indexed by slot. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingParams, fields_of
from triptych.types.step import RowError

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

NO_LOGPROBS = -1
NOTHING_ALLOWED = RowError.of_client(
    "sampling: min_tokens or bad_words mask every token that may be chosen; allow another, or mask fewer"
)
PARAM_COLUMNS = tuple(name for name, spec in SAMPLING_FIELDS.items() if spec.column)
"""Columns of `ops.sample` that are sampling parameters."""
COLUMN_TO_DTYPE: Mapping[str, np.dtype] = {
    **{name: np.dtype(SAMPLING_FIELDS[name].column) for name in PARAM_COLUMNS},
    "seeds": np.dtype(np.int64),
    "positions": np.dtype(np.int64),
}
"""All columns of `ops.sample`, in the order in which they are laid out."""


class LogitChange(IntEnum):
    """When the logits of a request are changed."""

    NEVER = 0
    SOMETIMES = 1
    ALWAYS = 2


class SlotObserver(Protocol):
    """Follows the requests as they enter and leave their slots."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange: ...

    def leave(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """Views of the runner's rows, indexed by slot; the runner writes, the sampler reads.

    A slot's tokens so far are `token_ids[slot, :num_known[slot]]`; the token being sampled gets position
    `num_known[slot]`.
    """

    token_ids: I32
    """[max_num_seqs, max_model_len]"""
    num_prompt: I64
    num_known: I64


class SamplingColumns:
    """Sampling parameters by slot. Owned by the runner's rows."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.observer: SlotObserver | None = None
        """The logits processors, set by the `Sampler`; None with a sampler that has no logits."""
        self.columns: dict[str, NDArray[np.number]] = {
            name: np.zeros(max_num_seqs, dtype)
            for name, dtype in COLUMN_TO_DTYPE.items()
            if name != "positions"
        }
        """Name of a column of `ops.sample` -> its values, each [max_num_seqs]. Positions come from the history."""
        self.temperature = self.columns["temperature"]
        """[max_num_seqs] temperature; 0 is greedy."""
        self.seeds: I64 = self.columns["seeds"]  # type: ignore[assignment]
        """[max_num_seqs] the bits of a u64."""
        self.first_temperature: F32 = np.zeros(max_num_seqs, np.float32)
        """[max_num_seqs] temperature of the choice among the logits as the model made them. It is 0, the cheapest, for
        requests that always choose among changed logits in the end."""
        self.num_logprobs: I32 = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        """[max_num_seqs] alternatives per token; 0: only the chosen one; -1: none."""
        self.slot_to_logprob_ids: dict[int, I64] = {}
        """Slot of each request that has named tokens -> their ids, which are reported in place of the best ones."""
        self.demanding: set[int] = set()
        """Slots that ask for more than one choice among the logits as they are."""

    def enter(self, slot: int, params: SamplingParams, seed: int) -> RowError | None:
        """Store one request's parameters, which the frontend has validated.

        Returns:
            Why the request cannot be served, or None if it can. A refused one is stored as plain greedy.
        """
        refusal = self._refusal(params)
        if refusal is not None:
            params = SamplingParams(temperature=0.0)
        for name in PARAM_COLUMNS:
            self.columns[name][slot] = getattr(params, name)
        if params.is_greedy:
            self.temperature[slot] = 0.0
        if params.top_k < 0:
            self.columns["top_k"][slot] = 0
        self.seeds[slot] = np.uint64(seed).view(np.int64)
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            self.slot_to_logprob_ids[slot] = np.array(params.logprob_token_ids, np.int64)
        change = LogitChange.NEVER if self.observer is None else self.observer.enter(slot, params)
        self.first_temperature[slot] = 0.0 if change is LogitChange.ALWAYS else self.temperature[slot]
        if change or params.logprobs is not None:
            self.demanding.add(slot)
        return refusal

    def take_over(self, other: SamplingColumns) -> None:
        """Copy the columns of requests that ask for one choice among the logits as they are."""
        for name, column in self.columns.items():
            column[:] = other.columns[name]
        self.first_temperature[:] = other.first_temperature
        self.num_logprobs[:] = other.num_logprobs

    def leave(self, slot: int) -> None:
        """Drop what a slot keeps outside the columns."""
        self.demanding.discard(slot)
        self.slot_to_logprob_ids.pop(slot, None)
        if self.observer is not None:
            self.observer.leave(slot)

    def _refusal(self, params: SamplingParams) -> RowError | None:
        """Check again what the frontend refuses, so that no caller of the engine finds a field ignored."""
        for name in _FIELDS_OF_IDS:
            if entries := getattr(params, name):
                token_ids = _ids_of(SAMPLING_FIELDS[name].kind, entries)
                outside = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
                if outside:
                    return RowError.of_client(
                        f"sampling.{name}: token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
                    )
        return None


class SamplingArrays:
    """Memory of the host for the columns of each step, allocated once."""

    def __init__(self, max_num_seqs: int) -> None:
        self.columns: Mapping[str, NDArray[Any]] = {
            name: np.full(max_num_seqs, getattr(_NEUTRAL, name, 0), dtype)
            for name, dtype in COLUMN_TO_DTYPE.items()
        }
        """Each [max_num_seqs], in the order of `COLUMN_TO_DTYPE`; the first rows belong to the step."""
        others = dict(self.columns)
        self._temperature = others.pop("temperature")
        self._positions = others.pop("positions")
        self._others = tuple(others.items())

    def gather(
        self, columns: SamplingColumns, history: TokenHistory, slots: I64, offsets: I64 | None = None
    ) -> None:
        """Fill in the parameters of these slots, in the order of the logits. Greedy rows need no others.

        Args:
            offsets: Guesses of each slot before the position that samples; None: it samples at one position.
        """
        count = slots.size
        temperature = columns.first_temperature[slots]
        self._temperature[:count] = temperature
        if not temperature.any():
            return
        for name, buffer in self._others:
            buffer[:count] = columns.columns[name][slots]
        self._positions[:count] = history.num_known[slots]
        if offsets is not None:
            self._positions[:count] += offsets

    def pad(self, count: int, padded: int) -> None:
        """Make the rows `count .. padded` greedy ones, for which nothing else matters."""
        self._temperature[count:padded] = 0.0


_NEUTRAL = SamplingParams(temperature=0.0)
_FIELDS_OF_IDS = fields_of(FieldKind.TOKEN_IDS, FieldKind.WORDS, FieldKind.BIASES, FieldKind.THINKING)


def _ids_of(kind: FieldKind, entries: Any) -> Sequence[int]:
    """Return all token ids in the value of a field."""
    if kind is FieldKind.THINKING:
        return entries.opening_id, entries.closing_id
    if kind is FieldKind.WORDS:
        return [token_id for sequence in entries for token_id in sequence]
    if kind is FieldKind.BIASES:
        return [token_id for token_id, _ in entries]
    token_ids: Sequence[int] = entries
    return token_ids
