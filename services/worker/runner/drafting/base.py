"""The interface between a step and those who guess tokens ahead of it. Needs no torch.

A row that is at the end of what is known computes its last known token and samples the next one. With guesses it
computes these as well, and samples at each position:

    position     6   7   8   9             known up to 6; three guesses
    computed     a   b   c   d
    sampled      b   c   x   y             at 6 and 7 the guess was right, so b, c and x are its next tokens

The token at a position is a function of the logits there, the request's parameters, its seed and the position. So a
guess is accepted if and only if it is the token that is sampled, and no token depends on what was guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import U32, NewRow, VerifiedGuesses
from triptych_services.worker.runner.request_rows import StepRows

if TYPE_CHECKING:
    from torch import Tensor

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """The tokens that a proposer expects to follow what is known of some rows."""

    token_ids: I64
    """[sum(counts)] those of each row, one row after the other."""
    counts: I64
    """[num_rows]"""

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Guesses:
        """Return the tokens of each row."""
        token_ids = [token_id for row in rows for token_id in row]
        return Guesses(np.array(token_ids, np.int64), np.array([len(row) for row in rows], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class GuessReport:
    """The part of a step's result that is about guesses."""

    next_counts: U32
    """[num_sampling] guesses that each sampling row may have when it computes next; empty: no row has any."""
    verified: tuple[VerifiedGuesses, ...] = ()
    """The guesses of this step, by proposer."""


class Proposer(Protocol):
    """Guesses the next tokens of rows. Owned by the `Speculation`, and used on the runner's thread.

    It reads the tokens of a slot in the history that it was created with.
    """

    @property
    def name(self) -> str:
        """Its name in metrics and the config."""

    def enter(self, row: NewRow) -> None:
        """Take in the row of an empty slot; its tokens are in the history."""

    def leave(self, slot: int) -> None:
        """Forget the row of a slot."""

    def accept(self, slots: I64, counts: I64) -> None:
        """Take in that rows have got tokens, which are the last ones in the history.

        Args:
            slots: [num_rows] rows that have entered.
            counts: [num_rows] tokens that each has got, >= 1.
        """

    def propose(self, slots: I64, limits: I64) -> Guesses:
        """Return the tokens that may follow the known ones of each row.

        Args:
            slots: [num_rows] rows that have entered.
            limits: [num_rows] the most tokens that are of use for each, >= 1.
        """


@runtime_checkable
class TakesTime(Protocol):
    """A proposer that takes longer for each place that it looks ahead, as a model does."""

    def place_seconds(self, num_rows: int) -> float | None:
        """Return what it takes to look one place further ahead of so many rows; None: that is not known by now."""

    def take_seconds(self) -> float:
        """Return what it has taken since this was asked last, as nearly as it knows without what else runs."""


@runtime_checkable
class ReadsTexts(Protocol):
    """A proposer that computes the text of a row before it guesses for it, as a model does."""

    def allow_reading(self, seconds: float | None) -> None:
        """Bound the time that texts may take in the next `propose`; None: by nothing."""

    def is_reading(self, slot: int) -> bool:
        """Return whether the latest `propose` found no guess since it computes the text of the row part by part."""

    def take_reading_seconds(self) -> float:
        """Return what texts have taken since this was asked last. `TakesTime.take_seconds` does not count it."""


@runtime_checkable
class ReadsStates(Protocol):
    """A proposer that goes on from what the model has computed, as a layer of its checkpoint does."""

    @property
    def state_layers(self) -> tuple[int, ...]:
        """For each state of a token that it reads, the layers before it; empty: it reads that behind the last norm."""

    def take_states(self, step: StepRows, token_counts: I64 | None, states: Tensor) -> None:
        """Take in the states of a step's tokens, before `accept` is called for it.

        Steps may be left out, while guesses may lose nothing more: rows then begin anew.

        Args:
            token_counts: As of `Speculation.finish`.
            states: [num_tokens or more, elements of all that it reads of a token], valid during the call only.
        """
