"""How often the streams of a frontend send: together, so many messages a second at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

_SHORTEST_S = 0.001  # of a wait: timers are no finer, and so few streams cost little
_EARLY = 0.25  # of the interval, by which a choice may leave too soon, with others


class PacedChoice(Protocol):
    """A streamed choice, as the pace sees it."""

    sent_at: float
    """When its last output left, by `time.monotonic`."""
    is_held: bool
    """Whether it waits for `release`, which sets it back."""

    def release(self) -> None:
        """Send what has come since."""


class Pace:
    """Holds new output back for a moment where tokens come faster than messages should leave.

    A message costs a frontend tens of microseconds, through gRPC or HTTP, and a token that leaves with another one
    costs a tenth of that. So the time between two messages of a stream grows with the number of streams. Output that
    comes later than that after the last, the first output and the end of a choice never wait. Owned by the generator.
    Bound to one event loop.
    """

    def __init__(self, max_messages_per_s: float, num_streams: Callable[[], int]) -> None:
        """
        Args:
            max_messages_per_s: Of all streams. 0: nothing is held back.
            num_streams: Return how many streams share them now.
        """
        self._message_s = 1 / max_messages_per_s if max_messages_per_s else 0.0
        self._num_streams = num_streams
        self._held: list[PacedChoice] = []
        self._timer: asyncio.TimerHandle | None = None

    def holds(self, choice: PacedChoice) -> bool:
        """Return whether new output of a choice waits. Then the choice is released at its time."""
        if choice.is_held:
            return True
        interval_s = self._interval_s
        if interval_s < _SHORTEST_S:
            return False
        wait_s = choice.sent_at + interval_s - time.monotonic()
        if wait_s <= 0:
            return False
        choice.is_held = True
        self._held.append(choice)
        if self._timer is None:
            self._set_timer(wait_s)
        return True

    @property
    def _interval_s(self) -> float:
        return self._num_streams() * self._message_s

    def _set_timer(self, wait_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._release_due)

    def _release_due(self) -> None:
        held, self._held, self._timer = self._held, [], None
        interval_s, now = self._interval_s, time.monotonic()
        latest = now - (1 - _EARLY) * interval_s
        for choice in held:
            if not choice.is_held:  # it has been released meanwhile, by its end
                continue
            if choice.sent_at > latest:
                self._held.append(choice)
            else:
                choice.release()
        if self._held:
            self._set_timer(max(min(choice.sent_at for choice in self._held) + interval_s - now, _SHORTEST_S))
