"""The engine's one loop: inbox, results, plans, outputs. It owns the engine core and the executor.

A step is planned and sent shortly before the worker has computed the last one, so the network hides behind the
computation. The order within a turn keeps the worker busy: results in, plans out, and only then outputs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from triptych import failpoints
from triptych.config import EngineConfig
from triptych.config.step_size import size_for_worker
from triptych.errors import ProtocolViolation, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import EngineMetrics
from triptych.prefix_hash import describe_hash
from triptych.rpc.session.outbox import Outbox
from triptych.types.facts import WorkerFacts
from triptych.types.kv_transfer import EngineRole
from triptych.types.outputs import OutputBatch
from triptych.types.step import StepResult
from triptych.types.submit import AttachRequest, EngineLimits, EngineWelcome, PrefixHash, SubmitRequest
from triptych_services.enginecore.adapters import EngineAdapters
from triptych_services.enginecore.inbox import Inbox
from triptych_services.enginecore.journal.recorder import create_engine
from triptych_services.enginecore.kv.remote import check_role
from triptych_services.enginecore.operators import EngineOperator
from triptych_services.enginecore.scheduler.admission import limits_of
from triptych_services.enginecore.wake_timer import WakeTimer
from triptych_services.enginecore.workers.base import Connected, Executor, WorkerLost
from triptych_services.enginecore.workers.connection import WorkerConnection
from triptych_services.enginecore.workers.steps_in_flight import SentSteps

log = logging.getLogger(__name__)

# A frontend drains its stream as fast as the network takes it. One that is this many steps behind is stuck, and its
# requests only hold blocks that others could use. More than what comes of steps of 1 ms while a stream can be resumed.
MAX_PENDING = 16384
MAX_PENDING_BYTES = 256 << 20  # log-probabilities of 1,024 requests with 20 alternatives are 0.2 MB a step

_T = TypeVar("_T")
FrontendOutbox = Outbox[OutputBatch, EngineWelcome]
"""Output batches by their ids, and the latest welcome."""


class EngineLoop:
    """Runs the engine core. Servicers call its public methods, which post calls to it; everything else is in `run`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        executor: Executor,
        metrics: EngineMetrics,
        on_ready_change: Callable[[bool], None],
    ) -> None:
        check_role(config)
        self._config = config
        self._executor = executor
        self._engine = create_engine(config, started_at_ms=time.time_ns() // 1_000_000)
        self._metrics = metrics
        self._on_ready_change = on_ready_change
        self._wake = asyncio.Event()
        self._inbox = Inbox(self._wake)
        self._timer = WakeTimer(self._wake, self._next_due_at)
        self._outboxes: dict[int, FrontendOutbox] = {}
        self._session_numbers = itertools.count(1)
        self._sent = SentSteps(config.scheduler.steps_in_flight, self._wake)
        self._connection = WorkerConnection(
            executor,
            on_event=self._wake.set,
            on_given_up=self._forget_worker,
            on_unreachable=self._note_unreachable,
        )
        self._readiness = (False, f"connecting to worker {config.engine.worker_address}")
        """Whether there is a worker, and if there is none, why."""
        self.adapters = EngineAdapters(
            self._engine,
            executor,
            at_start=config.model.adapters,
            on_change=self._publish_readiness,
            wake=self._wake.set,
        )
        self.operator = EngineOperator(
            self._engine,
            executor,
            self._connection,
            self._inbox,
            self._sent.depth,
            drain_s=config.engine.drain_s,
            welcome=lambda: self.welcome,
            on_change=self._publish_readiness,
            add_counts=self.adapters.add_counts,
        )
        self._releases, self._worker_sleep = self.operator.releases, self.operator.worker_sleep
        self.facts: WorkerFacts | None = None
        self.welcome = EngineWelcome(
            engine_id=config.engine.engine_id,
            ready=False,
            why_not_ready=self._readiness[1],
            limits=self._limits(None),
            boot_id=uuid.uuid4().hex,
            role=EngineRole[config.engine.role.upper()],
        )

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._engine.num_requests

    def open_session(self) -> tuple[int, FrontendOutbox]:
        """Open a session for a frontend. Its outbox begins with the current welcome."""
        session = next(self._session_numbers)
        outbox: FrontendOutbox = Outbox(max_messages=MAX_PENDING, max_bytes=MAX_PENDING_BYTES)
        self._outboxes[session] = outbox
        outbox.notify(self.welcome)
        for batch in self._engine.frontends.open_session(session):
            outbox.put(batch, batch.num_bytes)
        self._wake.set()  # the load comes with the next outputs
        return session, outbox

    def close_session(self, session: int) -> None:
        """Close a session that its frontend has left. Its requests end by the next step."""
        self._outboxes.pop(session).close()
        self._inbox.post(self._engine.frontends.close_session, session)

    def detach_session(self, session: int, lost_for_s: float) -> None:
        """Close a session after its frontend was lost `lost_for_s` ago. Requests that may be kept continue."""
        self._outboxes.pop(session).close()
        self._inbox.post(self._engine.frontends.detach_session, session, lost_for_s)

    async def wait_until_below_limit(self) -> None:
        """Wait until more may be posted. While a servicer waits here, gRPC holds back its frontend."""
        await self._inbox.wait_until_below_limit()

    def submit(self, session: int, request: SubmitRequest) -> None:
        """Queue a request. A refusal comes through the session's outbox."""
        self._inbox.post(self._submit, session, request, num_bytes=request.num_bytes)

    def _submit(self, session: int, request: SubmitRequest) -> None:
        """Give a request to the engine core, which knows adapters by their digests only."""
        try:
            self.adapters.check(request)
        except TriptychError as error:
            self._engine.frontends.refuse(session, request.numbers.tolist(), error)
        else:
            self._engine.frontends.submit(session, request)

    def refuse(self, session: int, numbers: Sequence[int], error: TriptychError) -> None:
        """Answer the choices of a request that the engine cannot even be given."""
        self._inbox.post(self._engine.frontends.refuse, session, numbers, error)

    def abort(self, session: int, numbers: Sequence[int]) -> None:
        """End requests for their clients' sake."""
        self._inbox.post(self._abort, session, numbers)

    def _abort(self, session: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._engine.frontends.abort(session, number)

    def stop(self, session: int, numbers: Sequence[int]) -> None:
        """End requests with what they have; those that may be kept are."""
        self._inbox.post(self._stop, session, numbers)

    def _stop(self, session: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._engine.frontends.stop(session, number)

    def detach(self, session: int, numbers: Sequence[int]) -> None:
        """Keep requests for another frontend. Those that may not be kept end."""
        self._inbox.post(self._detach, session, numbers)

    def _detach(self, session: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._engine.frontends.detach(session, number)

    def attach(self, session: int, attach: AttachRequest) -> None:
        """Send a request's outputs to this session from now on. A refusal comes through the session's outbox."""
        self._inbox.post(self._engine.frontends.attach, session, attach)

    async def run(self) -> None:
        """Connect and serve for ever. When the stream breaks, resume it or connect to another worker.

        Raises:
            StaleEpoch: Another engine has this one's worker, and must not be disturbed.
            ConfigError: This engine's config can never work with its worker's facts.
        """
        try:
            await self._begin(await self._meanwhile(self._connection.connect()), after_crash=False)
            while True:
                loss = await self._serve()
                if loss is None:
                    await self._rest()
                    continue
                log.warning("%s", loss, extra=with_fields(requests=self._engine.num_requests))
                self._metrics.worker_losses.inc()
                self._releases.note_worker(is_lost=True, now=time.monotonic())
                recovery = await self._meanwhile(self._connection.recover(loss))
                self._releases.note_worker(is_lost=False, now=time.monotonic())
                if not recovery.connected.is_resumed:
                    await self._begin(recovery.connected, after_crash=recovery.is_crash)
        finally:
            self._timer.stop()
            self._sent.stop()
            self.adapters.close()
            self._engine.close()
            await self._executor.close()

    async def _begin(self, connected: Connected, *, after_crash: bool) -> None:
        """Begin to serve with a worker that has no rows and no blocks. First it gets the adapters that it lacks."""
        await self._meanwhile(self.adapters.restore(connected.facts))
        self._engine.worker_ready(connected.facts, after_crash=after_crash)
        self._sent.start(connected.max_steps_in_flight, connected.facts.num_stages)
        self.facts = connected.facts
        self._set_ready(True, "")
        log.info(
            "worker connected",
            extra=with_fields(
                model=connected.facts.model.name,
                kv_blocks=connected.facts.kv.num_blocks,
                requests=self._engine.num_requests,
            ),
        )

    async def _rest(self) -> None:
        """Put the worker to sleep. Return when it was woken and is connected again."""
        sleep = await self._meanwhile(self._worker_sleep.fall_asleep())
        if sleep is not None:
            await self._meanwhile(sleep.is_over.wait())
            await self._begin(await self._meanwhile(self._connection.connect()), after_crash=False)
            self._worker_sleep.end()

    def _forget_worker(self) -> None:
        """Give up the worker's session: what ran waits again, and will be computed again."""
        self._sent.clear()
        self._engine.worker_lost()
        self._send_outputs()
        self._wake.set()

    def _note_unreachable(self, why: str) -> None:
        """Turn not ready, because there is no worker. While its session may be resumed the engine stays ready."""
        if not self.welcome.ready or not self._connection.has_session:
            self._set_ready(False, why)
        if self._connection.is_refused and self._engine.num_requests:
            self._engine.worker_refused(why)
            self._wake.set()

    async def _meanwhile(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Take in requests and notice deadlines until `work` is done, while there is no worker."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            while not task.done():
                self._wake.clear()
                self._inbox.make_calls()
                self._take_due()
                self._send_outputs()
                await asyncio.sleep(0)
                self._timer.note_turn()
                await self._wake.wait()
            return task.result()
        finally:
            task.cancel()

    async def _serve(self) -> WorkerLost | None:
        """Plan and send steps and take in results.

        Returns:
            Why the stream broke; None if the worker is to sleep.
        """
        try:
            while not self._worker_sleep.is_due:
                await self._turn()
            return None
        except WorkerLost as loss:
            why = f"the worker at {self._executor.address} was lost: {loss}"
            return WorkerLost(why, is_crash=loss.is_crash, is_orderly=loss.is_orderly)
        except ProtocolViolation as violation:
            return WorkerLost(f"the worker broke the protocol: {violation}", is_crash=True)

    async def _turn(self) -> None:
        """Take in what has come, plan, send outputs, and wait for more."""
        engine = self._engine
        self._wake.clear()
        self._inbox.make_calls()
        while results := self._executor.receive():  # until there are none; raises the loss behind them
            received_at = time.monotonic()
            for result in results:
                engine.apply(result)
                if failpoints.ARMED:
                    failpoints.reach("enginecore.after_result")
                self._note_step(result, received_at)
        if (progress := self._executor.take_kv_progress()) is not None:
            engine.note_kv_progress(progress)
        if (oldest_at := self._sent.oldest_at) is not None:
            self._connection.check_silence(oldest_at)
        self._take_due()
        while self._sent.may_plan():
            if (plan := engine.plan()) is None:
                self._sent.note_nothing()
                break
            self._sent.push(plan.num_tokens)
            await self._executor.send(plan)
        self._send_outputs()
        if self._inbox:
            await asyncio.sleep(0)  # so that streams are read meanwhile
        elif not self._worker_sleep.is_due:
            self._timer.note_turn()
            await self._wake.wait()

    def _note_step(self, result: StepResult, received_at: float) -> None:
        step = self._sent.pop(result.timings, received_at)
        self._connection.note_result(received_at)
        if step.num_tokens:  # else it held orders only
            self._metrics.step_seconds.observe(received_at - step.at)
            self._metrics.iteration_tokens.observe(step.num_tokens)

    def _take_due(self) -> None:
        """End what is over, and offer what may not end here."""
        self._engine.expire()
        if (within_s := self._releases.take_due(time.monotonic())) is not None:
            self._engine.release(within_s)

    def _next_due_at(self) -> float:
        """Return when the next turn is due although nothing comes in, in seconds of the monotonic clock."""
        due_at = self._engine.next_due_at
        if self._engine.num_requests:
            due_at = min(due_at, self._releases.next_due_at)
        if (oldest_at := self._sent.oldest_at) is not None:
            due_at = min(due_at, self._connection.silent_at(oldest_at))
        return due_at

    def _send_outputs(self) -> None:
        for session, batch in self._engine.take_outputs().items():
            if (outbox := self._outboxes.get(session)) is not None:
                outbox.put(batch, batch.num_bytes)
                if outbox.is_overrun:
                    log.warning("session %d does not read its outputs: its requests are aborted", session)
                    self._engine.frontends.close_session(session)

    def _limits(self, facts: WorkerFacts | None) -> EngineLimits:
        """Return what frontends may ask of this engine. Without a worker it may not be known how much runs at once."""
        scheduler, keeps_requests = self._config.scheduler, self._config.engine.max_kept_bytes > 0
        if facts is not None:
            scheduler = size_for_worker(scheduler, facts.max_num_seqs, facts.max_num_batched_tokens)
        return replace(limits_of(scheduler), keeps_requests=keeps_requests)

    def _describe_hash(self) -> PrefixHash | None:
        if self.facts is None or not self._config.cache.enable_prefix_caching:
            return None
        return describe_hash(self.facts.kv.block_size)

    def _set_ready(self, ready: bool, why_not_ready: str) -> None:
        self._readiness = (ready, why_not_ready)
        self._publish_readiness()

    def _publish_readiness(self) -> None:
        """Send the engine's state to every frontend and to the health service, if it has changed."""
        ready, why_not_ready = self._readiness
        if why := self.operator.why_refusing:
            ready, why_not_ready = False, why
        welcome = replace(
            self.welcome,
            ready=ready,
            why_not_ready=why_not_ready,
            model=self.facts.model if self.facts else None,
            limits=self._limits(self.facts),
            prefix_hash=self._describe_hash(),
            role=self.welcome.role,
            kv_endpoint=self.facts.kv_endpoint if self.facts else None,
            adapters=self.adapters.facts,
        )
        if welcome == self.welcome:
            return
        self.welcome = welcome
        for outbox in self._outboxes.values():
            outbox.notify(welcome)
        self._on_ready_change(ready)
