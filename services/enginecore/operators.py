"""Operators' calls to the engine: pause, drain, sleep, and what they change until they are taken back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

from triptych.types.facts import EngineStatus, PauseMode
from triptych.types.submit import EngineWelcome
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.inbox import Inbox
from triptych_services.enginecore.worker_sleep import WorkerSleep
from triptych_services.enginecore.workers.base import Executor
from triptych_services.enginecore.workers.connection import WorkerConnection
from triptych_services.enginecore.workers.steps_in_flight import PipelineDepth

_POLL_S = 0.01  # of calls that wait for the loop
_WORKER_AWAY_S = 0.25  # a worker that is started again takes seconds; a stream that broke is resumed before
_INTERVAL_S = (
    0.5  # between offers of the same requests: meanwhile a frontend may have found an engine for them
)


class EngineOperator:
    """Carries out operators' calls. The engine loop owns it; servicers call its public methods."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        connection: WorkerConnection,
        inbox: Inbox,
        pipeline_depth: PipelineDepth,
        *,
        drain_s: float,
        welcome: Callable[[], EngineWelcome],
        on_change: Callable[[], None],
        add_counts: Callable[[EngineStatus], EngineStatus],
    ) -> None:
        """
        Args:
            engine: The engine core.
            executor: The calls to the worker.
            connection: The session with the worker.
            inbox: Calls that the loop makes between two steps.
            pipeline_depth: Steps that may be in flight.
            drain_s: Time that requests have to end while the engine drains.
            welcome: Returns the state that frontends know.
            on_change: Called when the engine begins or ceases to refuse requests.
            add_counts: Returns a status with the numbers of what is no part of the engine core.
        """
        self._engine = engine
        self._add_counts = add_counts
        self._inbox = inbox
        self._pipeline_depth = pipeline_depth
        self._welcome = welcome
        self._on_change = on_change
        self._is_draining = False
        self._is_stopping = False
        self.releases = Releases(drain_s)
        self.worker_sleep = WorkerSleep(engine, executor, connection, in_loop=inbox.ask)

    @property
    def why_refusing(self) -> str:
        """Why no requests are taken, although there may be a worker. Empty: they are."""
        if self._is_stopping:
            return "the engine is stopping"
        return "the engine is draining" if self._is_draining else ""

    def stop_taking(self) -> None:
        """Take no more requests, because this process is to end. Those that are here continue, even after a pause."""
        self._is_stopping = True
        self._inbox.post(self._end_pause)
        self._note_change()

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache between two turns of the loop; see `EngineCore.reset_prefix_cache`."""
        num_blocks = self._engine.reset_prefix_cache()
        self._inbox.wake()  # all frontends receive the change
        return num_blocks

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine; see `EngineCore.pause`. Return when the last step is back, or after Resume."""
        await self._inbox.ask(self._pause, mode)
        while self._engine.is_settling:
            await asyncio.sleep(_POLL_S)

    async def resume(self) -> None:
        """End a pause, and take requests again after a drain. A sleep that has not started is cancelled."""
        self._is_draining = False
        self._note_change()
        await self._inbox.ask(self._end_pause)

    async def drain(self) -> None:
        """Take no more requests. Return when all have ended, or when the engine is resumed."""
        self._is_draining = True
        self._note_change()
        self._inbox.wake()  # requests are offered to others
        while self._is_draining and self._engine.num_requests:
            await asyncio.sleep(_POLL_S)

    def status(self) -> EngineStatus:
        """Return all counters."""
        welcome = self._welcome()
        status = self._engine.status(
            ready=welcome.ready,
            why_not_ready=welcome.why_not_ready,
            steps_in_flight=self._pipeline_depth.size,
        )
        status = self._add_counts(status)
        return replace(status, asleep=self.worker_sleep.is_asleep, draining=bool(self.why_refusing))

    def _pause(self, mode: PauseMode) -> None:
        self.worker_sleep.stay_paused()
        self._engine.pause(mode)

    def _end_pause(self) -> None:
        self.worker_sleep.cancel()
        self._engine.resume()

    def _note_change(self) -> None:
        self.releases.note_draining(bool(self.why_refusing), now=time.monotonic())
        self._on_change()


class Releases:
    """When an engine offers its requests to others: while it drains, and while it has no worker. The operator owns it.

    Times are seconds of the monotonic clock. An offer changes nothing here. A frontend that has another engine for a
    request moves it there and aborts it here; one that has none leaves it, and it may still end here.
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
