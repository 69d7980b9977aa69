"""When an engine offers its requests to others: while it drains, and while it has no worker."""

from __future__ import annotations

import math

_WORKER_AWAY_S = 0.25  # a worker that is started again takes seconds; a stream that broke is resumed before
_INTERVAL_S = (
    0.5  # between offers of the same requests: meanwhile a frontend may have found an engine for them
)


class Releases:
    """Owned by the engine loop. Times are seconds of the monotonic clock.

    An offer changes nothing here. A frontend that has another engine for a request moves it there and aborts it here;
    one that has none leaves it, and it may still end here.
    """

    def __init__(self, drain_s: float) -> None:
        """`drain_s`: Time that requests have to end while the engine drains."""
        self._drain_s = drain_s
        self._worker_lost_at: float | None = None
        self._draining_since: float | None = None
        self._next_at = 0.0

    def note_worker(self, *, is_lost: bool, now: float) -> None:
        self._worker_lost_at = now if is_lost else None

    def note_draining(self, is_draining: bool, *, now: float) -> None:
        if not is_draining:
            self._draining_since = None
        elif self._draining_since is None:
            self._draining_since, self._next_at = now, now

    @property
    def next_due_at(self) -> float:
        """When the next offer is due; inf: none is."""
        if self._worker_lost_at is not None:
            return max(self._worker_lost_at + _WORKER_AWAY_S, self._next_at)
        return math.inf if self._draining_since is None else self._next_at

    def take_due(self, now: float) -> float | None:
        """Return the time in seconds within which requests must end to be kept, 0 for none; None: no offer is due.

        In the first half of a drain those are offered that may not end in what is left of it, then all.
        """
        within_s: float | None = None
        if self._worker_lost_at is not None and now - self._worker_lost_at >= _WORKER_AWAY_S:
            within_s = 0.0
        elif self._draining_since is not None:
            left_s = self._draining_since + self._drain_s - now
            within_s = left_s if left_s > self._drain_s / 2 else 0.0
        if within_s is None or now < self._next_at:
            return None
        self._next_at = now + _INTERVAL_S
        return within_s
