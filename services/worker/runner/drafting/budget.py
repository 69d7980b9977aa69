"""How many guesses a step verifies: as many as bring the most tokens per second, none where they bring nothing.

A step of P positions takes cost(P), which is measured as steps run. A guess at the i-th place behind what is known of a
row is accepted if all before it are: with a chance of p^i, where p is what was accepted of the row's guesses lately.

    gains of two rows           0.9  0.81  0.73  0.66  …          0.3  0.09  …
    in falling order            0.9  0.81  0.73  0.66  0.3  0.09
    tokens per second with m    (2 + the first m of these) / cost(2 + m)      the best m decides

It is asked twice for a step: how many guesses the rows should look for, if the best proposer of each has some, and how
many of those that were found are verified, with what is known of the proposer that has found them.

An account holds what guesses have brought, and what it took to look for them and to verify them. They may lose 0.5% of
the time of steps, and where that is used up, a step has none: chances may be misjudged, time is not. Needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_NUM_EXACT = 16
"""Steps of up to so many positions are told apart; longer ones fall into classes, eight in each doubling."""
_NUM_KEPT = 5
"""Steps of a class that are kept, the latest. The fastest one counts: what else runs on a machine only slows steps."""
_NUM_TRUSTED = 3
"""Steps of a class before it counts, so that one bad moment of the machine does not decide."""
_MAX_AGE = 1000
"""Steps after which a measurement is doubted, so that bad moments do not decide for ever."""
_MAX_PLAIN_AGE = 64
"""Steps after which a step without guesses is due, so that what guesses bring is held against the machine as it is."""
_NUM_BETWEEN = 8
"""Steps between two looks at all measurements."""
_RATE_WEIGHT = 0.1
"""The weight of the latest verified guesses among those of their row."""
_OVERALL_WEIGHT = 0.02
"""The weight of the latest guesses of a row among those of all rows."""
_FADING = 0.99
"""The part of the knowledge of a row's guesses that is left after a step. Bad ones are tried again."""
_DRIFT = 0.002
"""The part of the way to `_PRIOR_RATE` that the share of right guesses of all rows takes in a step."""
_PRIOR_RATE = 0.5
"""The share of right guesses of a row of which nothing is known."""
_PRIOR_GUESSES = 2.0
"""Guesses of a row that weigh as much as those of all rows together."""
_MAX_RATE = 0.98
_MAX_VAIN = 60
"""Searches without any guess after which a proposer is asked for a row rarely: as many as the tokens of a long text
between two keys of a form."""
_VAIN_PAUSE = 25
"""Steps until it is asked then."""
_LEAST_CHANCE = 0.01
"""A guess that is right less often is not considered."""
_LOSS_SHARE = 0.005
"""The part of the time of steps that guesses may lose."""
_MAX_LOSS = 8.0
"""The steps without guesses that they may lose beyond that: when nothing is known yet, and when a text changes."""
_MAX_CREDIT = 12.0
"""The gains that may be lost again, in steps without guesses."""
_MIN_REST, _MAX_REST = 7, 31
"""Steps in which nothing is decided or measured, where guesses have no chance: a look at all costs a percent of a step
of a small model."""
_NEVER = 2.0
"""A chance that no guess has."""
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
        self._tables: dict[tuple[int, int], list[float]] = {}
        """First size and number of sizes -> their seconds, as of `_points`."""
        self.num_looks = 0
        """How often `_points` were formed. What is derived from estimates holds until then."""

    def note(self, num_positions: int, seconds: float) -> None:
        """Take in the duration of one step."""
        self._num_steps += 1
        key = _class_of(num_positions)
        measured = self._classes.get(key)
        if measured is None:
            measured = self._classes[key] = _Measured()
        is_news = len(measured.seconds) <= _NUM_TRUSTED or self._num_steps - measured.step > _MAX_PLAIN_AGE
        measured.add(num_positions, seconds, self._num_steps)
        if is_news or self._num_steps - self._num_known >= _NUM_BETWEEN:
            self._look()

    def knows(self, num_positions: int, max_age: int = _MAX_AGE) -> bool:
        """Return whether steps of this size were measured, the last time not longer ago than so many steps."""
        measured = self._classes.get(_class_of(num_positions))
        if measured is None or len(measured.seconds) < _NUM_TRUSTED:
            return False
        return measured.step >= self._num_steps - max_age

    def _look(self) -> None:
        """Form the points anew."""
        self._num_known = self._num_steps
        self.num_looks += 1
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

    def estimate(self, first: int, count: int) -> list[float] | None:
        """Return the seconds of steps of so many sizes in a row, [count]; None if nothing is known.

        More positions never count as cheaper. Beyond the largest size that was measured lately a step counts as no
        dearer than that one: so it is tried, and known from then on.
        """
        if self._points is None:
            return None
        table = self._tables.get((first, count))
        if table is None:
            table = np.interp(np.arange(first, first + count), *self._points).tolist()
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


class _Row:
    """The experience with the guesses of one row."""

    __slots__ = ("accepted", "asked_from", "since", "tried", "vain")

    def __init__(self, num_proposers: int) -> None:
        self.tried = [0.0] * num_proposers
        """By proposer: guesses that were looked at lately, the first wrong one included."""
        self.accepted = [0.0] * num_proposers
        """By proposer: those of them that were right."""
        self.vain = [0] * num_proposers
        """By proposer: its latest searches that have found none."""
        self.asked_from = [0] * num_proposers
        """By proposer: the step from which it is asked."""
        self.since = 0
        """The step of which `tried` and `accepted` are."""


class GuessBudget:
    """Decides how many guesses rows have. Owned by the `Speculation`.

    It computes with plain numbers: for the few rows that guesses are worth having for, arrays take longer.
    """

    def __init__(self, max_num_seqs: int, num_proposers: int, max_guesses: int) -> None:
        """
        Args:
            max_guesses: The most guesses of one row in a step.
        """
        self.costs = StepCosts()
        self._max_guesses = max_guesses
        self._rows = [_Row(num_proposers) for _ in range(max_num_seqs)]
        self._overall = [_PRIOR_RATE] * num_proposers
        """By proposer: share of right guesses, of all rows."""
        self._step = 0
        self._balance = 0.0
        """Seconds that guesses have gained, and may still lose where it is below 0."""
        self._plain_seconds = 0.0
        """The time of the latest step that was noted, without its guesses; 0: not known."""
        self._chances: dict[tuple[int, int, int], float] = {}
        """Arguments of `least_chance` -> what the costs say, as of `_num_looks`."""
        self._num_looks = 0

    def enter(self, slot: int) -> None:
        """Forget the row that was in a slot."""
        self._rows[slot] = _Row(len(self._overall))

    def start_step(self, num_rested: int = 0) -> None:
        """Let what is known of guesses fade, so that those which were bad are tried again.

        Args:
            num_rested: Steps before this one of which nothing was noted.
        """
        self._step += 1 + num_rested
        drift = _DRIFT * (1 + num_rested)
        self._overall = [rate + drift * (_PRIOR_RATE - rate) for rate in self._overall]
        self._balance += num_rested * _LOSS_SHARE * self._plain_seconds

    def rest(self) -> int:
        """Return how many steps may pass before it is worth asking again, where guesses have no chance just now."""
        if not self._plain_seconds:
            return 0
        lacking = -_MAX_LOSS * self._plain_seconds - self._balance
        if lacking <= 0:
            return _MIN_REST
        return min(_MIN_REST + int(lacking / (_LOSS_SHARE * self._plain_seconds)), _MAX_REST)

    def note_searched(self, slot: int, proposer: int, *, has_found: bool) -> None:
        """Take in whether a proposer has found guesses for a row that it was asked for."""
        row = self._rows[slot]
        row.vain[proposer] = 0 if has_found else row.vain[proposer] + 1
        if row.vain[proposer] >= _MAX_VAIN:
            row.asked_from[proposer] = self._step + _VAIN_PAUSE

    def note_verified(self, slot: int, proposer: int, drafted: int, accepted: int) -> None:
        """Take in how many of a proposer's guesses for a row were verified in a step, and how many were right."""
        row, looked_at = self._faded(slot), min(accepted + 1, drafted)
        row.tried[proposer] = row.tried[proposer] * (1 - _RATE_WEIGHT) + looked_at
        row.accepted[proposer] = row.accepted[proposer] * (1 - _RATE_WEIGHT) + accepted
        self._overall[proposer] += _OVERALL_WEIGHT * (accepted / looked_at - self._overall[proposer])

    def rates(self, slot: int) -> list[float]:
        """Return by proposer the chance that its next guess for a row is right, if all before it are."""
        row = self._faded(slot)
        return [
            min((accepted + _PRIOR_GUESSES * overall) / (tried + _PRIOR_GUESSES), _MAX_RATE)
            for accepted, tried, overall in zip(row.accepted, row.tried, self._overall, strict=True)
        ]

    def hopes(self, slot: int) -> list[float]:
        """Return the same, and 0 for a proposer that has found no guess for the row for long."""
        asked_from = self._rows[slot].asked_from
        rates = self.rates(slot)
        return [rate if step <= self._step else 0.0 for rate, step in zip(rates, asked_from, strict=True)]

    def note_step(self, num_rows: int, num_guesses: int, num_tokens: int, seconds: float | None) -> None:
        """Take in what a step has brought.

        Args:
            num_tokens: What its rows have got, all together.
            seconds: Its time; None if prompts are part of it.
        """
        size = num_rows + num_guesses
        if seconds is not None:
            self.costs.note(size, seconds)
        if (estimates := self.costs.estimate(num_rows, num_guesses + 1)) is None:
            return
        plain, took = estimates[0], estimates[-1]
        self._plain_seconds = plain
        if seconds is not None and not self.costs.knows(size):  # it may be slow for another reason, once
            took = max(took, min(seconds, plain * size / num_rows))
        if num_guesses:
            self._balance += plain * num_tokens / num_rows - took
        self._balance = min(self._balance + _LOSS_SHARE * took, _MAX_CREDIT * plain)

    def note_search(self, num_rows: int, seconds: float) -> None:
        """Take in how long proposers have looked for guesses for a step of so many rows."""
        if (estimates := self.costs.estimate(num_rows, 1)) is not None:
            self._balance -= min(seconds, estimates[0])

    def least_chance(self, num_rows: int, num_positions: int, most: int) -> float:
        """Return the chance of being right below which no guess gains; above 1: none does, or may lose any more.

        Arguments as of `allot`.
        """
        seconds = self.costs.estimate(num_positions, most + 1)
        if seconds is None or self._balance < -_MAX_LOSS * seconds[0]:
            return _NEVER
        if self._num_looks != self.costs.num_looks:
            self._num_looks = self.costs.num_looks
            self._chances.clear()
        key = num_rows, num_positions, most
        if (found := self._chances.get(key)) is None:
            most = min(most, num_rows * self._max_guesses)
            least = _LEAST_GAIN * num_rows / seconds[0]
            needed = [(least * seconds[count] - num_rows) / count for count in range(1, most + 1)]
            found = self._chances[key] = min(needed, default=_NEVER)
        return found

    def needs_plain(self, num_positions: int) -> bool:
        """Return whether the next step must have no guesses, since what such a step takes is not known any more."""
        return not self.costs.knows(num_positions, _MAX_PLAIN_AGE)

    def allot(
        self, rates: Sequence[float], found: Sequence[int] | None, num_positions: int, most: int
    ) -> list[int]:
        """Return how many guesses each row should have in the next step.

        Args:
            rates: By row: the chance that its next guess is right, if all before it are.
            found: By row: the most guesses that it may have; None: no row has fewer than others.
            num_positions: Positions of the step without guesses.
            most: Guesses of all rows together, at most.
        """
        counts, seconds = [0] * len(rates), self.costs.estimate(num_positions, most + 1)
        if seconds is None:
            return counts
        gains: list[tuple[float, int]] = []
        for row, rate in enumerate(rates):
            gain = 1.0
            for _ in range(self._max_guesses if found is None else min(found[row], self._max_guesses)):
                gain *= rate
                if gain < _LEAST_CHANCE:
                    break
                gains.append((gain, -row))
        gains.sort(reverse=True)
        num_tokens, best, num_kept = float(len(rates)), _LEAST_GAIN * len(rates) / seconds[0], 0
        for count, ((gain, _), duration) in enumerate(zip(gains, seconds[1:], strict=False), 1):
            num_tokens += gain
            if num_tokens > best * duration:
                best, num_kept = num_tokens / duration, count
        for _, row in gains[:num_kept]:
            counts[-row] += 1
        return counts

    def _faded(self, slot: int) -> _Row:
        """Return what is known of a row, as it has faded until this step."""
        row = self._rows[slot]
        if row.since < self._step:
            left = _FADING ** (self._step - row.since)
            row.tried = [count * left for count in row.tried]
            row.accepted = [count * left for count in row.accepted]
            row.since = self._step
        return row


def _class_of(num_positions: int) -> int:
    """Return the class of a size, ascending with it."""
    if num_positions <= _NUM_EXACT:
        return num_positions
    doublings = num_positions.bit_length()
    return doublings * 8 + (num_positions >> (doublings - 4))
