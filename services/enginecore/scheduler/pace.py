"""How often a request ends, and so how long a refused one should wait."""

from __future__ import annotations

_WEIGHT = 0.1  # of the latest interval: the average forgets half within 7 endings
_UNMEASURED_S = 1.0  # before two requests have ended
_LEAST_S, _MOST_S = 0.05, 30.0  # what a client is ever told


class EndingPace:
    """Each ending frees one place in the queue, so the k-th client refused since the last one is told to
    come back after k intervals: the refused do not all return at once."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last_ending: float | None = None
        self._num_refused = 0

    def note_ending(self, now: float) -> None:
        """`now` in seconds, never falling."""
        if self._last_ending is not None:
            interval = min(now - self._last_ending, _MOST_S)  # an idle hour says nothing of the pace
            average = interval if self._interval_s is None else self._interval_s
            self._interval_s = average + _WEIGHT * (interval - average)
        self._last_ending = now
        self._num_refused = 0

    def refuse(self) -> float:
        """Seconds after which one more refused client may find a place."""
        self._num_refused += 1
        interval = _UNMEASURED_S if self._interval_s is None else self._interval_s
        return min(max(self._num_refused * interval, _LEAST_S), _MOST_S)
