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
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.enginecore.engine import EngineCore
from services.enginecore.executor.base import Executor, WorkerLost
from services.enginecore.outbox import Outbox
from triptych.config import EngineConfig
from triptych.errors import EngineUnavailable, ProtocolViolation, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import EngineMetrics
from triptych.types.facts import EngineStatus, WorkerFacts
from triptych.types.submit import EngineWelcome, SubmitRequest

log = logging.getLogger(__name__)

_FIRST_REDIAL_S = 0.05
_MAX_REDIAL_S = 1.0
_TICK_S = 0.05  # how late a deadline may be noticed while nothing else happens
_MAX_WHY = 500
_MAX_INBOX = 4096  # frontends that send faster than turns come are read no further

_T = TypeVar("_T")


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
        self._has_room = asyncio.Event()
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

    def end_sessions(self) -> None:
        """End every frontend's stream, each after what it has been given."""
        for outbox in self._outboxes.values():
            outbox.close()

    async def wait_for_room(self) -> None:
        """Doors wait here between two messages; gRPC then holds back the frontend that sends too fast."""
        while len(self._inbox) >= _MAX_INBOX:
            self._has_room.clear()
            await self._has_room.wait()

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
        try:
            while True:
                await self._connect()
                why = await self._serve()
                log.warning("%s", why, extra=with_fields(requests_requeued=self._engine.num_requests))
                self._metrics.worker_losses.inc()
                self._sent_at.clear()
                self._engine.worker_lost()
                self._send_outputs()
        finally:
            await self._executor.close()

    async def _connect(self) -> None:
        """Dial until the worker welcomes us. Requests queue meanwhile; readiness lasts `resume_ttl_s`."""
        delay_s, lost_at, last_why = _FIRST_REDIAL_S, time.monotonic(), ""
        while True:
            try:
                connected = await self._meanwhile(self._executor.connect(self._wake.set))
                break
            except TriptychError as error:
                why = error.message[:_MAX_WHY]
                if why != last_why:
                    level = logging.INFO if isinstance(error, EngineUnavailable) else logging.WARNING
                    log.log(level, "worker %s: %s", self._config.engine.worker_address, why)
                    last_why = why
            if not self.welcome.ready or time.monotonic() - lost_at > self._config.engine.resume_ttl_s:
                self._set_ready(False, last_why)
            await self._meanwhile(asyncio.sleep(delay_s))
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

    async def _meanwhile(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Take in requests and notice deadlines until `work` is done, while there is no worker."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            while not task.done():
                self._wake.clear()
                self._drain_inbox()
                self._engine.expire()
                self._send_outputs()
                await self._wait(_TICK_S)
            return task.result()
        finally:
            task.cancel()

    async def _serve(self) -> str:
        """Plan and send steps, take in results, until the stream breaks; returns why."""
        try:
            while True:
                await self._turn()
        except WorkerLost as loss:
            return f"the worker at {self._config.engine.worker_address} was lost: {loss}"
        except ProtocolViolation as violation:
            return f"the worker broke the protocol: {violation}"

    async def _turn(self) -> None:
        engine = self._engine
        self._wake.clear()
        self._drain_inbox()
        while results := self._executor.receive():  # until it has none, or tells of the loss behind them
            received_at = time.monotonic()
            for result in results:
                engine.apply(result)
                self._metrics.step_seconds.observe(received_at - self._sent_at.popleft())
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
        self._has_room.set()

    def _send_outputs(self) -> None:
        for session, batch in self._engine.take_outputs().items():
            if (outbox := self._outboxes.get(session)) is not None:
                outbox.put(batch)
                if outbox.is_overrun:
                    log.warning("session %d does not read its outputs: its requests are aborted", session)
                    self._engine.close_session(session)

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
