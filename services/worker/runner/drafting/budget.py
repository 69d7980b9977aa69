"""How many guesses a step verifies: as many as bring the most tokens per second, none where they bring nothing.

A step of P positions takes cost(P), which is measured as steps run. A guess at the i-th place behind what is known of a
row is accepted if all before it are: with a chance of p^i, where p is what was accepted of the row's guesses lately.

    gains of two rows           0.9  0.81  0.73  0.66  …          0.3  0.09  …
    in falling order            0.9  0.81  0.73  0.66  0.3  0.09
    tokens per second with m    (2 + the first m of these) / cost(2 + m)      the best m decides

It is asked twice for a step: how many guesses the rows should look for, if the best proposer of each has some, and how
many of those that were found are verified, with what is known of the proposer that has found them. Needs no torch.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_NUM_EXACT = 16
"""Steps of up to so many positions are told apart; longer ones fall into classes, eight in each doubling."""
_NUM_KEPT = 5
"""Steps of a class that are kept, the latest. The fastest one counts: what else runs on a machine only slows steps."""
_NUM_TRUSTED = 3
"""Steps of a class before it counts, so that one bad moment of the machine does not decide."""
_MAX_AGE = 1000
"""Steps after which a measurement is doubted, so that bad moments do not decide for ever."""
_NUM_BETWEEN = 8
"""Steps between two looks at all measurements."""
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
_PATIENCE_LOSS = 0.05
"""The part of the patience with a proposer that is lost if it finds no guess for a row. 1 after one that finds some."""
_PATIENCE_GAIN = 0.0001
"""Added to it in a step, so that a proposer which never finds any is asked in one step of 25."""
_LEAST_PATIENCE = 0.05
"""Below, nothing is hoped for: after 58 searches in vain, as many as the tokens of a long text between two keys of a
form."""
_LEAST_GAIN = 1.02
"""Tokens per second with guesses, over those without, below which a step has none. Covers the search for guesses."""


class StepCosts:
    """The seconds of a step by its number of positions: the fastest of the latest by size, with straight lines
    between them."""

    def __init__(self) -> None:
        self._classes: dict[int, _Measured] = {}
        """Class of the size -> what was measured."""
        self._num_steps = 0
        self._num_known = 0
        """Steps that `_points` knows."""
        self._points: tuple[F64, F64] | None = None
        """Sizes and their seconds; None: nothing counts yet."""
        self._tables: dict[tuple[int, int], F64] = {}
        """First size and number of sizes -> their seconds, as of `_points`."""

    def note(self, num_positions: int, seconds: float) -> None:
        """Take in the duration of one step."""
        self._num_steps += 1
        key = _class_of(num_positions)
        measured = self._classes.get(key)
        if measured is None:
            measured = self._classes[key] = _Measured()
        measured.add(num_positions, seconds, self._num_steps)
        if len(measured.seconds) <= _NUM_TRUSTED or self._num_steps - self._num_known >= _NUM_BETWEEN:
            self._look()

    def _look(self) -> None:
        """Form the points anew."""
        self._num_known = self._num_steps
        self._tables.clear()
        oldest = self._num_steps - _MAX_AGE
        known = sorted(
            (measured.size, min(measured.seconds))
            for measured in self._classes.values()
            if len(measured.seconds) >= _NUM_TRUSTED and measured.step >= oldest
        )
        if known:
            sizes, seconds = np.array(known).T
            self._points = sizes, np.minimum.accumulate(seconds[::-1])[::-1]

    def estimate(self, first: int, count: int) -> F64 | None:
        """Return the seconds of steps of so many sizes in a row, [count]; None if nothing is known.

        More positions never count as cheaper. Beyond the largest size that was measured lately a step counts as no
        dearer than that one: so it is tried, and known from then on.
        """
        if self._points is None:
            return None
        table = self._tables.get((first, count))
        if table is None:
            table = np.interp(np.arange(first, first + count), *self._points)
            self._tables[first, count] = table
        return table


class _Measured:
    """The latest steps of a class of sizes."""

    __slots__ = ("seconds", "size", "step")

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self.size = 0.0
        """Their positions, on average."""
        self.step = 0
        """Number of the latest one."""

    def add(self, size: int, seconds: float, step: int) -> None:
        self.seconds.append(seconds)
        self.size += (size - self.size) / len(self.seconds)
        self.step = step


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
        self._patience: F64 = np.ones(shape)
        """[max_num_seqs, num_proposers] falls with each search for the row's guesses that is in vain."""
        self._exponents = np.arange(1, max_guesses + 1)

    def enter(self, slot: int) -> None:
        """Forget the row that was in a slot."""
        self._tried[slot] = self._accepted[slot] = 0
        self._patience[slot] = 1

    def fade(self, slots: I64) -> None:
        """Let what is known of rows that have run a step fade, so that guesses which were bad are tried again."""
        self._tried[slots] *= _FADING
        self._accepted[slots] *= _FADING
        self._overall += _DRIFT * (_PRIOR_RATE - self._overall)
        self._patience[slots] += _PATIENCE_GAIN

    def note_searched(self, slots: I64, proposer: int, has_found: NDArray[np.bool_]) -> None:
        """Take in whether a proposer has found guesses for rows that it was asked for, [num_rows]."""
        left = self._patience[slots, proposer] * (1 - _PATIENCE_LOSS)
        self._patience[slots, proposer] = np.where(has_found, 1.0, left)

    def note_verified(self, slots: I64, proposers: I64, drafted: I64, accepted: I64) -> None:
        """Take in what came of the guesses of a step.

        Args:
            slots: [n] rows that had guesses.
            proposers: [n] who made them.
            drafted: [n] guesses that were verified.
            accepted: [n] those of them that were right.
        """
        looked_at = np.minimum(accepted + 1, drafted)
        self._tried[slots, proposers] = self._tried[slots, proposers] * (1 - _RATE_WEIGHT) + looked_at
        self._accepted[slots, proposers] = self._accepted[slots, proposers] * (1 - _RATE_WEIGHT) + accepted
        for proposer in np.unique(proposers).tolist():
            own = proposers == proposer
            rate = accepted[own].sum() / looked_at[own].sum()
            self._overall[proposer] += _RATE_WEIGHT / 4 * (rate - self._overall[proposer])

    def rates(self, slots: I64) -> F64:
        """Return the chance that the next guess of each proposer for each row is right, if all before it are,
        [num_rows, num_proposers]."""
        prior = self._overall * _PRIOR_GUESSES
        rates = (self._accepted[slots] + prior) / (self._tried[slots] + _PRIOR_GUESSES)
        return np.minimum(rates, _MAX_RATE)

    def hopes(self, slots: I64) -> F64:
        """Return the same as `rates`, and 0 for those proposers that have found no guess for a row for long."""
        return np.where(self._patience[slots] < _LEAST_PATIENCE, 0.0, self.rates(slots))

    def may_gain(self, num_rows: int, num_positions: int, most: int) -> bool:
        """Return whether guesses would gain if all of them were right. Arguments as of `allot`."""
        seconds = self.costs.estimate(num_positions, most + 1)
        if seconds is None:
            return False
        most = min(most, num_rows * self._max_guesses)
        speeds = (num_rows + np.arange(most + 1)) / seconds[: most + 1]
        return bool(speeds.max() >= _LEAST_GAIN * speeds[0])

    def allot(self, rates: F64, found: I64 | None, num_positions: int, most: int) -> I64:
        """Return how many guesses each row should have in the next step, [num_rows].

        Args:
            rates: [num_rows] the chance that a row's next guess is right, if all before it are.
            found: [num_rows] the most guesses of each; None: of no row are there fewer than of others.
            num_positions: Positions of the step without guesses.
            most: Guesses of all rows together, at most.
        """
        num_rows = rates.size
        gains = (rates[:, None] ** self._exponents).ravel()  # [num_rows * max_guesses]
        if found is not None:
            gains[(self._exponents > found[:, None]).ravel()] = 0.0
        seconds = self.costs.estimate(num_positions, most + 1)
        order = np.argsort(-gains, kind="stable")[: min(most, np.count_nonzero(gains))]
        if seconds is None or not order.size:
            return np.zeros(num_rows, np.int64)
        speeds = (num_rows + np.cumsum(gains[order])) / seconds[1 : order.size + 1]
        best = int(speeds.argmax())
        if speeds[best] < _LEAST_GAIN * num_rows / seconds[0]:
            return np.zeros(num_rows, np.int64)
        return np.bincount(order[: best + 1] // self._max_guesses, minlength=num_rows)


def _class_of(num_positions: int) -> int:
    """Return the class of a size, ascending with it."""
    if num_positions <= _NUM_EXACT:
        return num_positions
    doublings = num_positions.bit_length()
    return doublings * 8 + (num_positions >> (doublings - 4))
