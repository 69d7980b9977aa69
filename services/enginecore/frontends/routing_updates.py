"""Updates for all frontends of this engine's load and prefix cache, from which they choose an engine per request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.types.outputs import CacheNews, LoadReport
from triptych_services.enginecore.scheduler.scheduler import Scheduler

INTERVAL_S = 0.05
"""Seconds between two updates at least: a message costs both sides as much as a step's plan."""
_MAX_MESSAGES_PER_S = 400  # to all frontends together; where there are more than 20, each gets fewer


@dataclass(frozen=True, slots=True)
class RoutingUpdate:
    """The load, and what has changed in the prefix cache since the last update."""

    load: LoadReport
    cache: CacheNews | None


class RoutingUpdates:
    """Decides when an update is due. The engine core owns it.

    While a step is computed, an update waits for the outputs of its result, for at most another interval: where worker
    and frontends share cores, a message would take them from the step.

    Updates are broadcast. A new frontend first receives the cache as of the last broadcast.
    """

    def __init__(self, clock: Callable[[], float], *, caches_prefixes: bool) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            caches_prefixes: Whether requests share blocks of equal content. False: cache contents are not sent.
        """
        self._clock = clock
        self._caches_prefixes = caches_prefixes
        self._updated_at = clock() - INTERVAL_S
        self._noticed_at = -math.inf
        """When it was seen that there is an update to send. -inf: not since the last one."""
        self._has_admitted = False
        """Frontends have sent requests since the last update, which they count beside the load until the next."""
        self._last_load: LoadReport | None = None

    def note_admitted(self) -> None:
        """Note that a request has come, which the load holds from now on."""
        self._has_admitted = True

    def due_at(self, scheduler: Scheduler, num_sessions: int) -> float:
        """Return when `take` has something to do, in seconds of the clock; inf: nothing has changed since the last."""
        if not self._has_changed(scheduler):
            return math.inf
        waits_since = self._noticed_at if scheduler.num_in_flight else -math.inf
        return max(self._updated_at, waits_since) + _interval_s(num_sessions)

    def take(
        self, scheduler: Scheduler, num_sessions: int, are_outputs_due: Callable[[], bool]
    ) -> RoutingUpdate | None:
        """Return what has changed since the last update; None where nothing has, or where it is too early.

        Args:
            are_outputs_due: Returns whether there are outputs that it can go with.
        """
        now, interval_s = self._clock(), _interval_s(num_sessions)
        if now < self._updated_at + interval_s:
            return None
        load = scheduler.measure_load()
        if not self._has_changed(scheduler, load):
            self._noticed_at = -math.inf
            return None
        if scheduler.num_in_flight and not are_outputs_due():
            if self._noticed_at == -math.inf:
                self._noticed_at = now
            if now < self._noticed_at + interval_s:
                return None
        has_cache_changed = self._has_cache_changed(scheduler)
        self._updated_at, self._noticed_at, self._last_load = now, -math.inf, load
        self._has_admitted = False
        return RoutingUpdate(load, scheduler.cache_changes.take() if has_cache_changed else None)

    def take_base(self, scheduler: Scheduler) -> Sequence[bytes]:
        """Return what was cached at the last update, for a new frontend. The load follows with the next outputs."""
        self._last_load = None
        return scheduler.cache_changes.base() if self._caches_prefixes else ()

    def _has_changed(self, scheduler: Scheduler, load: LoadReport | None = None) -> bool:
        """Return whether there is something to send. `load`: None: it is measured, if nothing else has changed."""
        if self._has_admitted or self._has_cache_changed(scheduler):
            return True
        return self._has_load_changed(scheduler.measure_load() if load is None else load)

    def _has_cache_changed(self, scheduler: Scheduler) -> bool:
        return self._caches_prefixes and bool(scheduler.cache_changes)

    def _has_load_changed(self, load: LoadReport) -> bool:
        """Return whether requests came, moved on or ended. New measured times are no reason for an update."""
        last = self._last_load
        return last is None or _amounts(last) != _amounts(load)


def _interval_s(num_sessions: int) -> float:
    return max(INTERVAL_S, num_sessions / _MAX_MESSAGES_PER_S)


def _amounts(load: LoadReport) -> tuple[int, ...]:
    return load.num_prefill_tokens, load.num_running, load.num_waiting, load.num_free_blocks
