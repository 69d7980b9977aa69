"""The time of something by its size, as it is measured while a machine works on other things too. Needs no torch."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

MAX_PLAIN_AGE = 64
"""Steps after which a step without guesses is due, so that what guesses bring is held against the machine as it is."""
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

    def pass_to(self, step: int) -> None:
        """Take in that this is the number of the step by now, where not all steps are measured here."""
        self._num_steps = max(self._num_steps, step)
        if self._num_steps - self._num_known > MAX_PLAIN_AGE:
            self._look()

    def note(self, num_positions: int, seconds: float) -> None:
        """Take in the duration of one step."""
        self._num_steps += 1
        key = _class_of(num_positions)
        measured = self._classes.get(key)
        if measured is None:
            measured = self._classes[key] = _Measured()
        is_news = len(measured.seconds) <= _NUM_TRUSTED or self._num_steps - measured.step > MAX_PLAIN_AGE
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
        self._points = None
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


def _class_of(num_positions: int) -> int:
    """Return the class of a size, ascending with it."""
    if num_positions <= _NUM_EXACT:
        return num_positions
    doublings = num_positions.bit_length()
    return doublings * 8 + (num_positions >> (doublings - 4))
