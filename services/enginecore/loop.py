"""The engine's one loop: inbox, results, plans, outputs; it owns the engine core and the executor.

A step is planned and sent before the result of the last one is back, so the network hides behind the
computation. The order within a turn keeps the worker busy: results in, plans out, and only then outputs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable

from services.enginecore.engine import EngineCore
from services.enginecore.executor.base import Executor, WorkerLost
from services.enginecore.outbox import Outbox
from triptych.config import EngineConfig
from triptych.errors import ProtocolViolation, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import EngineMetrics
from triptych.types.facts import EngineStatus, WorkerFacts
from triptych.types.submit import EngineWelcome, SubmitRequest

log = logging.getLogger(__name__)

_FIRST_REDIAL_S = 0.05
_MAX_REDIAL_S = 1.0
_TICK_S = 0.05  # how late a deadline may be noticed while nothing else happens
_MAX_WHY = 500


class EngineLoop:
    """Doors touch `submit`, `abort` and the sessions; everything else happens in `run`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        executor: Executor,
        epoch: int,
        metrics: EngineMetrics,
        on_ready_change: Callable[[bool], None],
    ) -> None:
        self._config = config
        self._executor = executor
        self._engine = EngineCore(config)
        self._epoch = epoch
        self._metrics = metrics
        self._on_ready_change = on_ready_change
        self._wake = asyncio.Event()
        self._inbox: deque[Callable[[], None]] = deque()
        self._outboxes: dict[int, Outbox] = {}
        self._session_numbers = itertools.count(1)
        self._sent_at: deque[float] = deque()
        self._window = 0
        self._is_draining = False
        self.facts: WorkerFacts | None = None
        self.welcome = EngineWelcome(
            engine_id=config.engine.engine_id,
            epoch=epoch,
            ready=False,
            why_not_ready=f"connecting to worker {config.engine.worker_address}",
            has_priorities=config.scheduler.policy == "priority",
        )

    @property
    def num_requests(self) -> int:
        """Alive, running or waiting."""
        return self._engine.num_requests

    def open_session(self) -> tuple[int, Outbox]:
        """A frontend has connected; its outbox begins with the current welcome."""
        session, outbox = next(self._session_numbers), Outbox()
        self._outboxes[session] = outbox
        self._engine.open_session(session)
        outbox.put(self.welcome)
        return session, outbox

    def close_session(self, session: int) -> None:
        """A frontend has left; its requests end by the next step."""
        self._outboxes.pop(session).close()
        self._post(lambda: self._engine.close_session(session))

    def submit(self, session: int, request: SubmitRequest) -> None:
        self._post(lambda: self._engine.submit(session, request))

    def abort(self, session: int, number: int) -> None:
        self._post(lambda: self._engine.abort(session, number))

    def start_draining(self) -> None:
        """Tell frontends to send no more; what is here goes on."""
        self._is_draining = True
        self._set_ready(False, "the engine is draining")

    def reset_prefix_cache(self) -> int:
        """See `EngineCore.reset_prefix_cache`; runs between two turns of the loop."""
        return self._engine.reset_prefix_cache()

    def status(self) -> EngineStatus:
        return self._engine.status(
            ready=self.welcome.ready, why_not_ready=self.welcome.why_not_ready, window=self._window
        )

    async def run(self) -> None:
        """Connect, serve, and when the worker is lost connect again, for ever.

        Raises:
            ConfigError: this engine's config can never work with its worker's facts.
        """
        while True:
            await self._connect()
            try:
                await self._serve()
            except WorkerLost as loss:
                why = f"the worker at {self._config.engine.worker_address} was lost: {loss}"
            except ProtocolViolation as violation:
                why = f"the worker broke the protocol: {violation}"
            log.warning("%s", why, extra=with_fields(requests_requeued=self._engine.num_requests))
            self._metrics.worker_losses.inc()
            self._sent_at.clear()
            self._engine.worker_lost()
            self._send_outputs()

    async def _connect(self) -> None:
        """Dial until the worker welcomes us. Requests queue meanwhile; readiness lasts `resume_ttl_s`."""
        delay_s, lost_at, last_why = _FIRST_REDIAL_S, time.monotonic(), ""
        while True:
            try:
                connected = await self._executor.connect(self._wake.set)
                break
            except TriptychError as error:
                why = error.message[:_MAX_WHY]
                if why != last_why:
                    log.info("worker %s: %s", self._config.engine.worker_address, why)
                    last_why = why
            if not self.welcome.ready or time.monotonic() - lost_at > self._config.engine.resume_ttl_s:
                self._set_ready(False, last_why)
            await self._idle(delay_s)
            delay_s = min(2 * delay_s, _MAX_REDIAL_S)
        self._engine.worker_ready(connected.facts)
        self.facts, self._window = connected.facts, connected.window
        self._set_ready(True, "")
        log.info(
            "worker connected",
            extra=with_fields(
                model=connected.facts.model.name,
                kv_blocks=connected.facts.kv.num_blocks,
                window=connected.window,
                requeued=self._engine.num_requests,
            ),
        )

    async def _idle(self, duration_s: float) -> None:
        """Take in requests and notice deadlines while there is no worker."""
        until = time.monotonic() + duration_s
        while (remaining_s := until - time.monotonic()) > 0:
            self._drain_inbox()
            self._engine.expire()
            self._send_outputs()
            await self._wait(min(remaining_s, _TICK_S))

    async def _serve(self) -> None:
        """Plan and send steps, take in results, until the stream breaks (WorkerLost)."""
        engine = self._engine
        while True:
            self._wake.clear()
            self._drain_inbox()
            for result in self._executor.receive():
                engine.apply(result)
                self._metrics.step_seconds.observe(time.monotonic() - self._sent_at.popleft())
            engine.expire()
            while engine.num_in_flight < self._window and (plan := engine.plan()) is not None:
                self._sent_at.append(time.monotonic())
                await self._executor.send(plan)
            self._send_outputs()
            if not self._inbox:
                await self._wait(_TICK_S if engine.num_requests else None)

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _send_outputs(self) -> None:
        for session, batch in self._engine.take_outputs().items():
            if (outbox := self._outboxes.get(session)) is not None:
                outbox.put(batch)

    def _set_ready(self, ready: bool, why_not_ready: str) -> None:
        """Tell health and every frontend, if anything has changed; draining is for good."""
        if self._is_draining:
            ready, why_not_ready = False, "the engine is draining"
        welcome = EngineWelcome(
            engine_id=self.welcome.engine_id,
            epoch=self._epoch,
            ready=ready,
            why_not_ready=why_not_ready,
            model=self.facts.model if self.facts else None,
            has_priorities=self.welcome.has_priorities,
        )
        if welcome == self.welcome:
            return
        self.welcome = welcome
        for outbox in self._outboxes.values():
            outbox.put(welcome)
        self._on_ready_change(ready)
