"""Notices a step that hangs: the worker judges itself, since nobody else knows what it is doing.

Loading, allocating and warming up are no steps; they take as long as they take and report their progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TIMES_AVERAGE = 30.0  # a step so many times longer than the last ones is no long step
_WEIGHT = 0.05  # of the latest step in the moving average
_TICK_S = 1.0


class StepHung(Exception):
    """A step has made no progress for too long; the message says which and for how long."""


class StepClock:
    """When the step in hand began. Written by the runner thread, read by the event loop: plain assignments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step_id = 0
        """Of the step in hand; 0: none."""
        self.average_s = 0.0
        self._started_at = 0.0

    def start(self, step_id: int) -> None:
        self._started_at = self._clock()
        self.step_id = step_id

    def stop(self) -> None:
        self.step_id = 0
        elapsed_s = self._clock() - self._started_at
        self.average_s += _WEIGHT * (elapsed_s - self.average_s) if self.average_s else elapsed_s


class Watchdog:
    """Counts how long a step is in hand, in ticks of its own: time for which the whole process stood still (a
    stopped container, a sleeping laptop) is not held against the step."""

    def __init__(self, steps: StepClock, *, hang_timeout_s: float, tick_s: float = _TICK_S) -> None:
        """`hang_timeout_s`: the least time that a step is given."""
        self._steps = steps
        self._least_s = hang_timeout_s
        self._tick_s = min(tick_s, hang_timeout_s / 4)
        self._watched_step = 0
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
        step_id = self._steps.step_id
        if not step_id or step_id != self._watched_step:
            self._watched_step, self._watched_s = step_id, 0.0
            return
        self._watched_s += self._tick_s
        limit_s = max(self._least_s, _TIMES_AVERAGE * self._steps.average_s)
        if self._watched_s > limit_s:
            raise StepHung(
                f"step {step_id} has run for {self._watched_s:.0f} s, the limit is {limit_s:.0f} s "
                f"(worker.hang_timeout_s, or {_TIMES_AVERAGE:.0f} times the average step)"
            )
