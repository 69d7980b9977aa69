"""Wakes the engine loop when something comes due, and not before."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

TICK_S = 0.05
"""Seconds by which a deadline may be noticed late that passes right after a turn; longer than most steps."""
_LEAST_S = 0.001  # what uvloop's timers resolve


class WakeTimer:
    """The one timer of an engine loop, which owns it. Its times are on the monotonic clock.

        turn ──► one tick later: is anything due? ── it is ──► turn
                                        ▲      ├── later ──► look then
                                        │      └── nothing ──► no timer until the next turn
                                        └────────────┘

    A timer for each turn would cost as much as the turn, so turns that follow each other within a tick share one look.
    Whatever changes the engine outside a turn must wake the loop: the turn looks again.
    """

    def __init__(self, wake: asyncio.Event, next_due_at: Callable[[], float]) -> None:
        """
        Args:
            wake: Set when something is due.
            next_due_at: Returns when the next thing comes due, in seconds; inf: nothing does.
        """
        self._wake = wake
        self._next_due_at = next_due_at
        self._timer: asyncio.TimerHandle | None = None
        self._is_within_tick = False
        """Whether the timer is that of a turn."""

    def note_turn(self) -> None:
        """Look within a tick: the turn that ends may have changed what comes due."""
        if not self._is_within_tick:
            self._start(TICK_S)
            self._is_within_tick = True

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._is_within_tick = None, False

    def _start(self, after_s: float) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(max(after_s, _LEAST_S), self._look)

    def _look(self) -> None:
        self._timer, self._is_within_tick = None, False
        rest_s = self._next_due_at() - time.monotonic()
        if rest_s <= 0:
            self._wake.set()
        elif rest_s < math.inf:
            self._start(rest_s)
