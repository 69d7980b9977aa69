"""What the engine has measured of itself: how long requests run, and how long steps take."""

from __future__ import annotations

from bisect import bisect_left

_RUN_WEIGHT = 0.1  # of the latest run in the moving average: it forgets half within 7 endings
_STEP_WEIGHT = 0.1  # of the latest step among those of its size
_UNMEASURED_S = 1.0  # between two endings, before any request has ended
_LEAST_S, _MOST_S = 0.05, 30.0  # what a client refused for a full queue is ever told


class EndingPace:
    """How often a place becomes free: n rows whose requests run for t seconds each free n / t of them a second
    (Little's law). So an hour without requests says nothing, and the first burst is judged by what ran before."""

    def __init__(self) -> None:
        self._run_s: float | None = None
        self._num_refused = 0

    def note_ending(self, ran_s: float | None) -> None:
        """A request has ended, `ran_s` after its first admission; None: it never ran."""
        self._num_refused = 0
        if ran_s is not None:
            average = ran_s if self._run_s is None else self._run_s
            self._run_s = average + _RUN_WEIGHT * (ran_s - average)

    def interval_s(self, num_seats: int) -> float | None:
        """Seconds from one ending to the next while so many run; None before any has ended."""
        return None if self._run_s is None else self._run_s / num_seats

    def refuse(self, num_seats: int) -> float:
        """Seconds after which one more refused client may find a place: the k-th since the last ending is told
        to come back after k intervals, so that the refused do not all return at once."""
        self._num_refused += 1
        interval = self.interval_s(num_seats)
        return min(
            max(self._num_refused * (_UNMEASURED_S if interval is None else interval), _LEAST_S), _MOST_S
        )


class StepPace:
    """How long a step of so many tokens takes: averages by size, in classes of doubling width, and straight
    lines between them. Rare sizes are not forgotten while common ones are measured."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._classes: dict[int, tuple[float, float]] = {}
        """bit length of the size -> average size, average seconds"""

    def note(self, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        key = num_tokens.bit_length()
        size, average = self._classes.get(key, (num_tokens, seconds))
        self._classes[key] = (
            size + _STEP_WEIGHT * (num_tokens - size),
            average + _STEP_WEIGHT * (seconds - average),
        )

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many tokens; at least one must have been measured.

        Above the largest size measured the line from the smallest to the largest goes on: where only one is
        known, a step costs what it costs.
        """
        points = sorted(self._classes.values())
        above = bisect_left(points, (num_tokens, 0.0))
        if above == 0:
            return points[0][1]
        (low, low_s), (high, high_s) = (
            (points[0], points[-1]) if above == len(points) else (points[above - 1], points[above])
        )
        slope = (high_s - low_s) / (high - low) if high > low else 0.0
        return low_s + max(slope, 0.0) * (num_tokens - low)
