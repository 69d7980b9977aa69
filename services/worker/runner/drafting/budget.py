"""How many guesses a step verifies: as many as bring the most tokens per second, none where they bring nothing.

A step of P positions takes cost(P), which is measured as steps run. A guess at the i-th place behind what is known of a
row is accepted if all before it are: with a chance of p^i, where p is what was accepted of the row's guesses lately.

    gains of two rows           0.9  0.81  0.73  0.66  …          0.3  0.09  …
    in falling order            0.9  0.81  0.73  0.66  0.3  0.09
    tokens per second with m    (2 + the first m of these) / cost(2 + m)      the best m decides

Needs no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_COST_WEIGHT = 0.1
"""The weight of the latest step among those of its size."""
_NUM_EXACT = 16
"""Steps of up to so many positions are told apart; longer ones fall into classes, eight in each doubling."""
_MAX_AGE = 2000
"""Steps after which a measurement is doubted, so that one bad moment of the machine does not decide for ever."""
_RATE_WEIGHT = 0.1
"""The weight of the latest verified guesses among those of their row."""
_FADING = 0.99
"""The part of the knowledge of a row's guesses that is left after a step. Bad ones are tried again."""
_DRIFT = 0.002
"""The part of the way to `_PRIOR_RATE` that the share of right guesses of all rows takes in a step."""
_PRIOR_RATE = 0.5
"""The share of right guesses of a row of which nothing is known."""
_PRIOR_GUESSES = 2.0
"""Guesses of a row that weigh as much as those of all rows together."""
_MAX_RATE = 0.98
_LEAST_GAIN = 1.02
"""Tokens per second with guesses, over those without, below which a step has none. Covers the search for guesses."""


class StepCosts:
    """The seconds of a step by its number of positions, in averages by size with straight lines between them."""

    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float, int, int]] = {}
        """class of the size -> average size, average seconds, number of steps, when it was last measured"""
        self._num_steps = 0
        self._points: tuple[F64, F64] | None = None

    def note(self, num_positions: int, seconds: float) -> None:
        """Take in the duration of one step."""
        self._num_steps += 1
        key = _class_of(num_positions)
        size, average, count, since = self._classes.get(key, (num_positions, seconds, 0, 0))
        if count and self._num_steps - since > _MAX_AGE:
            count = 0
        weight = max(_COST_WEIGHT, 1 / (count + 1))
        self._classes[key] = (
            size + weight * (num_positions - size),
            average + weight * (seconds - average),
            count + 1,
            self._num_steps,
        )
        self._points = None

    def estimate(self, sizes: I64) -> F64 | None:
        """Return the seconds of steps of these sizes, [num_sizes]; None if nothing is known.

        More positions never count as cheaper. Beyond the largest size that was measured lately a step counts as no
        dearer than that one: so it is tried, and known from then on.
        """
        if not self._classes:
            return None
        if self._points is None:
            oldest = self._num_steps - _MAX_AGE
            known = sorted(entry for entry in self._classes.values() if entry[3] >= oldest)
            seconds = np.minimum.accumulate(np.array([entry[1] for entry in known])[::-1])[::-1]
            self._points = np.array([entry[0] for entry in known]), seconds
        return np.interp(sizes, *self._points)


class GuessBudget:
    """Decides how many guesses rows have. Owned by the `Speculation`."""

    def __init__(self, max_num_seqs: int, num_proposers: int, max_guesses: int) -> None:
        """
        Args:
            max_guesses: The most guesses of one row in a step.
        """
        self.costs = StepCosts()
        self._max_guesses = max_guesses
        shape = max_num_seqs, num_proposers
        self._tried: F64 = np.zeros(shape)
        """[max_num_seqs, num_proposers] guesses of the row that were looked at lately, the first wrong one included."""
        self._accepted: F64 = np.zeros(shape)
        """[max_num_seqs, num_proposers] those of them that were right."""
        self._overall: F64 = np.full(num_proposers, _PRIOR_RATE)
        """[num_proposers] share of right guesses, of all rows."""
        self._latest: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] the proposer that guessed last for the row."""
        self._exponents = np.arange(1, max_guesses + 1)

    def enter(self, slot: int) -> None:
        """Forget the row that was in a slot."""
        self._tried[slot] = self._accepted[slot] = 0
        self._latest[slot] = int(self._overall.argmax())

    def fade(self, slots: I64) -> None:
        """Let what is known of rows that have run a step fade, so that guesses which were bad are tried again."""
        self._tried[slots] *= _FADING
        self._accepted[slots] *= _FADING
        self._overall += _DRIFT * (_PRIOR_RATE - self._overall)

    def note_verified(self, slots: I64, proposers: I64, drafted: I64, accepted: I64) -> None:
        """Take in what came of the guesses of a step.

        Args:
            slots: [n] rows that had guesses.
            proposers: [n] who made them.
            drafted: [n] guesses that were verified.
            accepted: [n] those of them that were right.
        """
        looked_at = np.minimum(accepted + 1, drafted)
        self._latest[slots] = proposers
        self._tried[slots, proposers] = self._tried[slots, proposers] * (1 - _RATE_WEIGHT) + looked_at
        self._accepted[slots, proposers] = self._accepted[slots, proposers] * (1 - _RATE_WEIGHT) + accepted
        for proposer in np.unique(proposers).tolist():
            own = proposers == proposer
            rate = accepted[own].sum() / looked_at[own].sum()
            self._overall[proposer] += _RATE_WEIGHT / 4 * (rate - self._overall[proposer])

    def rates(self, slots: I64) -> F64:
        """Return the chance that the next guess of each row is right, if all before it are, [num_rows]."""
        proposers = self._latest[slots]
        prior = self._overall[proposers] * _PRIOR_GUESSES
        rates = (self._accepted[slots, proposers] + prior) / (self._tried[slots, proposers] + _PRIOR_GUESSES)
        return np.minimum(rates, _MAX_RATE)

    def allot(self, slots: I64, num_positions: int, most: int) -> I64:
        """Return how many guesses each row should have in the next step, [num_rows].

        Args:
            slots: [num_rows] rows that sample.
            num_positions: Positions of the step without guesses.
            most: Guesses of all rows together, at most.
        """
        none = np.zeros(slots.size, np.int64)
        most = min(most, slots.size * self._max_guesses)
        if not slots.size or most <= 0:
            return none
        seconds = self.costs.estimate(num_positions + np.arange(most + 1))
        if seconds is None:
            return none
        # Even if all guesses were right.
        if ((slots.size + np.arange(1, most + 1)) / seconds[1:]).max() < _LEAST_GAIN * slots.size / seconds[
            0
        ]:
            return none
        gains = (self.rates(slots)[:, None] ** self._exponents).ravel()  # [num_rows * max_guesses]
        order = np.argsort(-gains, kind="stable")[:most]
        speeds = (slots.size + np.cumsum(gains[order])) / seconds[1 : order.size + 1]
        best = int(speeds.argmax())
        if speeds[best] < _LEAST_GAIN * slots.size / seconds[0]:
            return none
        return np.bincount(order[: best + 1] // self._max_guesses, minlength=slots.size)


def _class_of(num_positions: int) -> int:
    """Return the class of a size, ascending with it."""
    if num_positions <= _NUM_EXACT:
        return num_positions
    doublings = num_positions.bit_length()
    return doublings * 8 + (num_positions >> (doublings - 4))
