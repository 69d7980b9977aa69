"""Notices a step that hangs: the worker judges itself, since no other process knows what it is doing.

Loading, allocating and warming up are no steps; they take as long as they take and report their progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TIMES_AVERAGE = 30.0  # a step so many times longer than the last ones of its size is no long step
_TIMES_FORECAST = (
    2.0  # the same for a size above all that were measured, by the time per token of the largest
)
_LEAST_PACE = 2.0  # tokens a second, while nothing is measured: a large model on a small machine
_WEIGHT = 0.05  # of the latest step in the moving average
_TICK_S = 1.0


class StepHung(Exception):
    """A step has made no progress for too long; the message says which and for how long."""


class StepClock:
    """When the step in hand began, and how long steps of its size may take. Written by the runner thread, read by the
    event loop: plain assignments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.serial = 0
        """Number of the current step, counted over all sessions; 0 if there is none."""
        self.step_id = 0
        """Id of that step in its session."""
        self.num_tokens = 0
        """Tokens of that step."""
        self.allowed_s = 0.0
        """Seconds that a step of so many tokens may take, by those measured."""
        self.num_started = 0
        """Steps that have begun, over all sessions."""
        self._started_at = 0.0
        self._classes: dict[int, tuple[float, float]] = {}
        """Bit length of a step's number of tokens to the moving averages of that number and of seconds."""

    def start(self, step_id: int, num_tokens: int) -> None:
        self.num_started += 1
        self._started_at = self._clock()
        self.step_id, self.num_tokens = step_id, num_tokens
        self.allowed_s = self._allowance_s(num_tokens)
        self.serial = self.num_started

    def stop(self) -> None:
        """The step in hand is done."""
        self.serial = 0
        elapsed_s, key = self._clock() - self._started_at, self.num_tokens.bit_length()
        size, average_s = self._classes.get(key, (self.num_tokens, elapsed_s))
        self._classes[key] = (
            size + _WEIGHT * (self.num_tokens - size),
            average_s + _WEIGHT * (elapsed_s - average_s),
        )

    def abandon(self) -> None:
        """The step in hand will not be waited for: how long it has run says nothing."""
        self.serial = 0

    def _allowance_s(self, num_tokens: int) -> float:
        if not self._classes:
            return num_tokens / _LEAST_PACE
        above = [key for key in self._classes if key >= num_tokens.bit_length()]
        if above:  # a smaller step takes no longer
            return _TIMES_AVERAGE * self._classes[min(above)][1]
        size, average_s = self._classes[max(self._classes)]
        return max(_TIMES_FORECAST * num_tokens / max(size, 1.0), _TIMES_AVERAGE) * average_s


class Watchdog:
    """Counts how long a step is in hand, in ticks of its own: time for which the whole process stood still (a
    stopped container, a sleeping laptop) is not held against the step."""

    def __init__(self, steps: StepClock, *, hang_timeout_s: float, tick_s: float = _TICK_S) -> None:
        """`hang_timeout_s`: the least time that a step is given."""
        self._steps = steps
        self._least_s = hang_timeout_s
        self._tick_s = min(tick_s, hang_timeout_s / 4)
        self._watched = 0
        """Serial of the step seen at the last tick."""
        self._watched_s = 0.0

    async def run(self) -> None:
        """Watch until a step hangs.

        Raises:
            StepHung
        """
        while True:
            await asyncio.sleep(self._tick_s)
            self.tick()

    def tick(self) -> None:
        """One look; raises StepHung."""
        steps = self._steps
        serial = steps.serial
        if not serial or serial != self._watched:
            self._watched, self._watched_s = serial, 0.0
            return
        self._watched_s += self._tick_s
        limit_s = max(self._least_s, steps.allowed_s)
        if self._watched_s > limit_s:
            raise StepHung(
                f"step {steps.step_id} has run for {self._watched_s:.0f} s, the limit is {limit_s:.0f} s "
                f"(worker.hang_timeout_s, or more by the time that steps of {steps.num_tokens} tokens take)"
            )
