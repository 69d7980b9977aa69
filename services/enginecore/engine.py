"""The engine core without I/O: requests in, plans out, results in, output batches out.

submit / abort ──► scheduler ──► plan() ──► worker
                      ▲                       │
take_outputs() ◄──────┴────── apply(result) ◄─┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from triptych.config import EngineConfig
from triptych.config.step_size import size_for_worker
from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    ProtocolViolation,
    WrongState,
)
from triptych.types.facts import EngineStatus, PauseMode, WorkerFacts
from triptych.types.identity import Comparison, Likeness, compare
from triptych.types.journal import (
    AdapterGone,
    AdaptersAwaited,
    CacheReset,
    Expired,
    KvProgressed,
    Paused,
    Planned,
    ResultTaken,
    Resumed,
    WorkerGone,
    WorkerReady,
    WorkerRefused,
)
from triptych.types.kv_transfer import KvProgress
from triptych.types.outputs import OutputBatch
from triptych.types.step import StepPlan, StepResult
from triptych_services.enginecore.frontends.requests import FrontendRequests
from triptych_services.enginecore.frontends.routing_updates import RoutingUpdates
from triptych_services.enginecore.journal.listener import CallLog, EngineListener
from triptych_services.enginecore.request import Request, largest_token
from triptych_services.enginecore.restrictions import Pause, Restrictions
from triptych_services.enginecore.scheduler.admission import check_config
from triptych_services.enginecore.scheduler.forecast import StepInterval
from triptych_services.enginecore.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class RequestedAdapters:
    """The adapters that requests have. Part of the engine core."""

    def __init__(self, calls: CallLog, frontends: FrontendRequests) -> None:
        self._calls = calls
        self._frontends = frontends
        self._scheduler: Scheduler | None = None
        self._waiting: tuple[str, ...] = ()

    def serve_with(self, scheduler: Scheduler) -> None:
        """Begin with the scheduler of another worker."""
        self._scheduler = scheduler
        scheduler.keep_waiting(self._waiting)

    def in_use(self) -> set[str]:
        """Return the digests of the adapters of all requests that run or wait."""
        return set(self.priorities())

    def priorities(self) -> dict[str, int]:
        """Return digest -> lowest priority value of the requests with this adapter that run or wait."""
        return self._scheduler.requests.adapters() if self._scheduler else {}

    def tenants(self) -> dict[str, set[str]]:
        """Return digest -> tenants of the requests with this adapter that run or wait."""
        return self._scheduler.requests.adapter_tenants() if self._scheduler else {}

    def running(self) -> set[str]:
        """Return the digests of the adapters of all requests with a row, or with results still to come."""
        return self._scheduler.requests.running_adapters() if self._scheduler else set()

    def keep_waiting(self, digests: tuple[str, ...]) -> None:
        """Let no more rows have these adapters, and only these, until the next call.

        Args:
            digests: Adapters that the worker has not in memory, or is to drop.
        """
        self._calls.start(AdaptersAwaited, digests)
        self._waiting = digests
        if self._scheduler is not None:
            self._scheduler.keep_waiting(digests)

    def fail(self, digest: str, why: str) -> None:
        """End all requests for an adapter that the worker cannot have any more."""
        self._calls.start(AdapterGone, digest, why)
        if self._scheduler is not None:
            requests = self._scheduler.requests
            failed = [requests.fail(each, EngineFailure(why)) for each in requests.with_adapter(digest)]
            self._frontends.note_failed(tuple(failed))


class EngineCore:
    """Everything of the engine but I/O. The engine loop owns it, and nothing else calls it."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        listener: EngineListener | None = None,
    ) -> None:
        """Create an engine that has no worker yet.

        Args:
            config: Options of the whole process.
            clock: Monotonic time in seconds.
            listener: Receives every call and decision; None: no listener, at no cost.

        Raises:
            ConfigError: Scheduler options cannot work together.
        """
        check_config(config.scheduler)
        self._config = config
        self._calls = CallLog(clock, listener)
        self._scheduler: Scheduler | None = None
        self._facts: WorkerFacts | None = None
        self._updates = RoutingUpdates(clock, caches_prefixes=config.cache.enable_prefix_caching)
        self._restrictions = Restrictions()
        self.frontends = FrontendRequests(
            self._calls,
            self._updates,
            self._restrictions.crashes,
            max_kept_bytes=config.engine.max_kept_bytes,
        )
        self._interrupted: dict[Request, int] = {}
        """Requests in flight when the worker was lost -> their positions. Empty once the next worker is there."""
        self._interval = StepInterval()
        self.adapters = RequestedAdapters(self._calls, self.frontends)

    @property
    def num_in_flight(self) -> int:
        """Number of steps in flight."""
        return self._scheduler.num_in_flight if self._scheduler else 0

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._scheduler.num_requests if self._scheduler else 0

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler, to be read only; None until a worker has been ready."""
        return self._scheduler

    def worker_ready(self, facts: WorkerFacts, *, after_crash: bool) -> None:
        """Begin with a worker that has no rows and no blocks. What ran before waits again.

        Args:
            facts: What the worker has answered.
            after_crash: Whether the last worker died, so that a request in flight may have killed it.

        Raises:
            ConfigError: This config cannot work with these facts; names both values.
        """
        self._calls.start(WorkerReady, facts, after_crash)
        previous, before = self._scheduler, self._facts
        config = size_for_worker(self._config.scheduler, facts.max_num_seqs, facts.max_num_batched_tokens)
        check_config(config)
        num_stages = min(facts.num_stages, self._config.scheduler.steps_in_flight or facts.num_stages)
        self._scheduler = Scheduler(
            config,
            replace(facts, num_stages=num_stages),
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            clock=self._calls.now,
            kv_lease_s=self._config.engine.kv_lease_s,
        )
        self._facts = facts
        self.adapters.serve_with(self._scheduler)
        self.frontends.serve_with(self._scheduler, facts)
        if previous is not None:
            self.frontends.note_failed(self._scheduler.adopt(previous))
        if after_crash and (suspect := self._restrictions.crashes.note_crash(self._interrupted)) is not None:
            why = "the worker died twice while it computed this request, the last time with no other suspect beside it"
            self.frontends.note_failed((self._scheduler.requests.fail(suspect, EngineFailure(why)),))
        self._interrupted = {}
        if before is not None:
            self._give_up_output(compare(before.model.identity, facts.model.identity))
        self._restrict()

    def _give_up_output(self, comparison: Comparison) -> None:
        """Give the requests with output back to their frontends if the new worker computes otherwise than the last.

        A frontend knows whether a request may go on elsewhere, or here with other bits, and reports it to its client.
        """
        if comparison.likeness >= Likeness.NUMERICS:
            return
        assert self._scheduler is not None, "a worker is ready"
        why = f"the worker was replaced by one that computes otherwise ({comparison.difference})"
        given_up = self._scheduler.requests.with_output()
        log.warning("%s: %d requests with output are given up", why, len(given_up))
        self.frontends.note_failed(
            tuple(self._scheduler.requests.fail(each, EngineUnavailable(why)) for each in given_up)
        )

    def worker_lost(self) -> None:
        """Let what runs wait again, with prompt and emitted tokens: no result will come for what is in flight."""
        self._calls.start(WorkerGone)
        assert self._scheduler is not None, "a worker was lost that was never ready"
        self._interval.note_idle()
        self._interrupted = self._scheduler.requests_in_flight()
        self._scheduler.requeue_all()

    def worker_refused(self, why: str) -> None:
        """Give all requests back to their frontends, because the worker will not serve this engine.

        A frontend moves them to another engine, or to this one if it is served in time, and else ends them.
        """
        self._calls.start(WorkerRefused, why)
        if self._scheduler is not None and (given_up := self._scheduler.requests.all()):
            log.warning("%d requests are given back: %s", len(given_up), why)
            self.frontends.note_failed(
                tuple(self._scheduler.requests.fail(each, EngineUnavailable(why)) for each in given_up)
            )

    def release(self, within_s: float = 0.0) -> None:
        """Offer the requests that may not end within a time to their frontends, which may move them to other engines.

        They go on here until their frontends abort them.
        """
        if self._scheduler is not None:
            for request in self._scheduler.requests.beyond(within_s, self._interval.seconds):
                self.frontends.outputs.release(request.session, request.number)

    def note_kv_progress(self, progress: KvProgress) -> None:
        """Take in how far the worker's transfers of KV blocks have come."""
        self._calls.start(KvProgressed, progress)
        if self._scheduler is not None:
            self._scheduler.transfers.note_progress(progress, self._calls.now_s)

    def expire(self) -> None:
        """End all requests with a deadline that has passed, and those that no frontend has come back for."""
        self.frontends.expire()
        if self._scheduler is not None and self._scheduler.has_work:
            self._calls.start(Expired)
            self.frontends.note_failed(self._scheduler.requests.expire(self._calls.now_s))

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute now."""
        self._calls.advance()
        try:
            plan = self._plan()
        except Exception:
            self._calls.report(Planned(None))  # replayed, it fails in the same way
            raise
        if self._calls.listener is not None:
            self._calls.report(Planned(plan))
        return plan

    def apply(self, result: StepResult) -> None:
        """Take in one step's result. Its outputs wait for `take_outputs`.

        Raises:
            ProtocolViolation: It does not answer the oldest step in flight, or is no result of this model; nothing has
                changed.
        """
        self._calls.start(ResultTaken, result)
        assert self._scheduler is not None, "a result came before any worker was ready"
        assert self._facts is not None
        if (worst := largest_token(result.token_ids)) >= self._facts.model.vocab_size:
            raise ProtocolViolation(f"result of step {result.step_id}: {worst} is not in the vocabulary")
        output = self._scheduler.update(result)
        self.frontends.outputs.add_step(output, result)
        self.frontends.note_finished(output.finished)
        self.frontends.note_failed(output.failed)
        self._interval.note_result(self._calls.now_s, is_last=not self.num_in_flight)

    def take_outputs(self) -> dict[int, OutputBatch]:
        """Return, for each session with something due, what happened to its requests since its last batch."""
        if self._scheduler is None:
            return self.frontends.outputs.take(0)
        outputs = self.frontends.outputs
        update = self._updates.take(self._scheduler, len(outputs), outputs.are_due)
        return outputs.take(self._scheduler.num_free_places, update)

    @property
    def next_due_at(self) -> float:
        """When something comes due without a further call, in seconds of the clock; inf: nothing does.

        That is what `expire` ends, what `plan` tries again, or an update that `take_outputs` returns.
        """
        due_at, scheduler = self.frontends.kept.next_expiry_at, self._scheduler
        if scheduler is not None:
            update_at = self._updates.due_at(scheduler, len(self.frontends.outputs))
            due_at = min(due_at, scheduler.next_due_at, update_at)
        return due_at

    def pause(self, mode: PauseMode) -> None:
        """Compute no more than `mode` says, until `resume`. New requests queue. A second pause replaces the first."""
        self._calls.start(Paused, mode)
        scheduler = self._scheduler
        if mode is PauseMode.ABORT and scheduler is not None:
            self.frontends.note_finished(scheduler.requests.abort_all())
        started = scheduler.requests.started() if scheduler is not None and mode is PauseMode.WAIT else ()
        self._restrictions.pause = Pause(started, is_frozen=mode is PauseMode.KEEP)
        self._restrict()

    def resume(self) -> None:
        """End the pause, if there is one."""
        self._calls.start(Resumed)
        self._restrictions.pause = None
        self._restrict()

    @property
    def is_paused(self) -> bool:
        return self._restrictions.pause is not None

    @property
    def is_settling(self) -> bool:
        """Whether the engine is paused, and something that the pause lets finish has not finished."""
        pause = self._restrictions.pause
        return pause is not None and not pause.is_settled(self.num_in_flight)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, and return how many blocks lost their content.

        Raises:
            WrongState: Blocks are in use.
            EngineUnavailable: No worker has been ready yet.
        """
        self._calls.start(CacheReset)
        if self._scheduler is None:
            raise EngineUnavailable("the engine has no worker yet")
        before = self._scheduler.snapshot()
        if not self._scheduler.reset_prefix_cache():
            raise WrongState(
                f"ResetPrefixCache: {before.num_used_blocks} blocks are in use; try again when no request runs"
            )
        return before.num_cached_blocks

    def status(self, *, ready: bool, why_not_ready: str, steps_in_flight: int) -> EngineStatus:
        """Return all counters.

        Args:
            ready: Whether requests are served.
            why_not_ready: Why not; empty if they are.
            steps_in_flight: Depth of the pipeline of steps.
        """
        status = EngineStatus(
            engine_id=self._config.engine.engine_id,
            ready=ready,
            why_not_ready=why_not_ready,
            steps_in_flight=steps_in_flight,
            step_ns=int(self._interval.seconds * 1e9),
            paused=self.is_paused,
            journal=self._calls.listener.state if self._calls.listener else "off",
        )
        if (journal := self._calls.listener) is not None:
            status = replace(
                status, journal_bytes=journal.num_bytes, journal_oldest_at_ms=journal.oldest_at_ms
            )
        if self._scheduler is None or self._facts is None:
            return status
        status = replace(status, num_kept=self.frontends.kept.num_unread)
        return self._scheduler.add_counts(status, self._facts.kv, now=self._calls.now_s)

    def close(self) -> None:
        """Report the end of the run to the listener. The last call."""
        self._calls.close()

    def _plan(self) -> StepPlan | None:
        if self._scheduler is None:
            return None
        if self._restrictions.crashes.has_suspects:
            self._restrictions.crashes.review()
            self._restrict()
        return self._scheduler.schedule()

    def _restrict(self) -> None:
        if self._scheduler is not None:
            self._scheduler.restrict(
                self._restrictions.admissible, may_compute=self._restrictions.may_compute
            )
