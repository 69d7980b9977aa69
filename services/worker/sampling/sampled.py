"""The tokens that a step has sampled, on the host. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import LogprobColumns, RowError

I64 = NDArray[np.int64]

NO_GUESS = -2
"""No token id, and not that of a position without a usable logit either, which is -1."""

NOT_FINITE = RowError("the model's logits hold NaN or infinity")


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The tokens of the sampling rows, in the order of the slots given."""

    token_ids: I64
    """[sum(token_counts)]; one of 0 where the row failed."""
    logprobs: LogprobColumns | None
    """Log-probabilities of the tokens of rows that asked and did not fail; None if there are none."""
    failures: tuple[tuple[int, RowError], ...]
    """(row, why), ascending. Such a row has one token."""
    token_counts: I64 | None = None
    """[num_rows] tokens of each, >= 1; None: one each."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlaces:
    """The positions at which a step samples where some of its rows guess: one for each row, and one per guess.

    sampling row    0      1   2
    guesses         b c        x
    place           0 1 2  3   4 5
    row             0 0 0  1   2 2
    offset          0 1 2  0   0 1
    guess           b c .  .   x .         the token that is compared with the one sampled at the place
    """

    rows: I64
    """[num_places] sampling row of each."""
    offsets: I64
    """[num_places] guesses of the row before each."""
    guesses: I64
    """[num_places] `NO_GUESS` behind the last guess of a row."""
    first: I64
    """[num_sampling] first place of each row."""
    counts: I64
    """[num_sampling] guesses of each row."""

    @staticmethod
    def of(token_ids: I64, counts: I64) -> SamplingPlaces:
        """Return the places of a step.

        Args:
            token_ids: [sum(counts)] guesses of each sampling row, one row after the other.
            counts: [num_sampling]
        """
        ends = np.cumsum(counts + 1)
        first = ends - counts - 1
        rows = np.repeat(np.arange(counts.size), counts + 1)
        offsets = np.arange(rows.size) - first[rows]
        guesses = np.full(rows.size, NO_GUESS, np.int64)
        guesses[offsets < counts[rows]] = token_ids
        return SamplingPlaces(rows, offsets, guesses, first, counts)

    def sampled(
        self,
        chosen: I64,
        reported: Sequence[tuple[LogprobColumns, I64]] = (),
        errors: Mapping[int, RowError] = MappingProxyType({}),
    ) -> SampledTokens:
        """Return the tokens of each row: one, and one for each right guess before the first wrong one.

        Where there is nothing to choose from behind right guesses, the row gets these. It fails in its next step.

        Args:
            chosen: [num_places] token sampled at each place, as if the guesses before it were right; negative: none.
            reported: Log-probabilities of some places, and the place of each of their rows.
            errors: Why a row has no token at its first place; it has logits that are not finite if nothing is said.
        """
        is_wrong = chosen != self.guesses
        last = np.minimum.reduceat(np.where(is_wrong, np.arange(chosen.size), chosen.size), self.first)
        counts = last - self.first + 1  # [num_sampling]
        counts -= (counts > 1) & (chosen[last] < 0)
        is_taken = self.offsets < counts[self.rows]
        token_ids = chosen[is_taken]
        failed = np.flatnonzero(token_ids[np.cumsum(counts) - counts] < 0).tolist()
        return SampledTokens(
            np.maximum(token_ids, 0),
            _join_logprobs(reported, np.cumsum(is_taken) - 1),
            tuple((row, errors.get(row, NOT_FINITE)) for row in failed),
            counts,
        )


def _join_logprobs(parts: Sequence[tuple[LogprobColumns, I64]], token_of: I64) -> LogprobColumns | None:
    """Return the log-probabilities of several choices of one step as one table, or None if there are none.

    Args:
        parts: Log-probabilities of each choice, and the place of each of its rows.
        token_of: [num_places] index of the token at each place among those of the step.
    """
    if not parts:
        return None
    rows = np.concatenate([token_of[places[part.rows]] for part, places in parts])
    lengths = np.concatenate([np.diff(part.offsets.astype(np.int64)) for part, _ in parts])
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(rows)
    offsets = np.zeros(rows.size + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    entries = np.arange(offsets[-1]) + np.repeat(starts[order] - offsets[:-1], lengths[order])
    token_ids, logprobs, ranks = (
        np.concatenate([getattr(part, name) for part, _ in parts])
        for name in ("token_ids", "logprobs", "ranks")
    )
    return LogprobColumns(
        rows=rows[order].astype(np.uint32),
        offsets=offsets.astype(np.uint32),
        token_ids=token_ids[entries],
        logprobs=logprobs[entries],
        ranks=ranks[order],
    )
