"""News of this engine for all frontends, so that each can find which engine serves a request soonest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.types.outputs import CacheNews, EngineLoad
from triptych_services.enginecore.scheduler.scheduler import Scheduler

INTERVAL_S = 0.05
"""News that come sooner go out together: a message costs both sides as much as a step's plan."""
_MAX_MESSAGES_PER_S = (
    400  # to all frontends together; where there are more than 20, each gets them less often
)


@dataclass(frozen=True, slots=True)
class EngineNews:
    """The load, and what has changed in the prefix cache since the last news."""

    load: EngineLoad
    cache: CacheNews | None


class NewsDesk:
    """Decides when there is news. The engine core owns it.

    All frontends get the same news at the same time. One that comes begins with what was cached at the last news.
    """

    def __init__(self, clock: Callable[[], float], *, caches_prefixes: bool) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            caches_prefixes: Whether requests find what others have computed. If not, the cache is not reported.
        """
        self._clock = clock
        self._caches_prefixes = caches_prefixes
        self._told_at = clock() - INTERVAL_S
        self._last_load: EngineLoad | None = None

    def due_at(self, scheduler: Scheduler, num_sessions: int) -> float:
        """Return when `take` returns news, in seconds of the clock; inf: nothing has changed since the last ones."""
        if self._has_cache_news(scheduler) or self._has_changed(scheduler.measure_load()):
            return self._told_at + _interval_s(num_sessions)
        return math.inf

    def take(self, scheduler: Scheduler, num_sessions: int) -> EngineNews | None:
        """Return what has changed since the last news; None where nothing has, or where it is too early."""
        now = self._clock()
        if now < self._told_at + _interval_s(num_sessions):
            return None
        load, has_cache_news = scheduler.measure_load(), self._has_cache_news(scheduler)
        if not has_cache_news and not self._has_changed(load):
            return None
        self._told_at, self._last_load = now, load
        return EngineNews(load, scheduler.cache_changes.take() if has_cache_news else None)

    def take_base(self, scheduler: Scheduler) -> Sequence[bytes]:
        """Return what was cached at the last news, for a frontend that has just come. The load follows soon."""
        self._last_load = None
        return scheduler.cache_changes.base() if self._caches_prefixes else ()

    def _has_cache_news(self, scheduler: Scheduler) -> bool:
        return self._caches_prefixes and bool(scheduler.cache_changes)

    def _has_changed(self, load: EngineLoad) -> bool:
        """Return whether requests came, moved on or ended. The measured times alone are no news."""
        last = self._last_load
        return last is None or _amounts(last) != _amounts(load)


def _interval_s(num_sessions: int) -> float:
    return max(INTERVAL_S, num_sessions / _MAX_MESSAGES_PER_S)


def _amounts(load: EngineLoad) -> tuple[int, ...]:
    return load.num_prefill_tokens, load.num_running, load.num_waiting, load.num_free_blocks
