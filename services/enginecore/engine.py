"""The engine core without I/O: requests in, plans out, results in, output batches out.

submit / abort ──► scheduler ──► plan() ──► worker
                      ▲                       │
take_outputs() ◄──────┴────── apply(result) ◄─┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from triptych.config import EngineConfig
from triptych.config.step_size import size_for_worker
from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    FeatureDisabled,
    ProtocolViolation,
    TriptychError,
    WrongState,
)
from triptych.types.facts import EngineStatus, PauseMode, WorkerFacts
from triptych.types.identity import Comparison, Likeness, compare
from triptych.types.journal import (
    Aborted,
    CacheReset,
    Expired,
    JournalEvent,
    KvProgressed,
    Paused,
    Planned,
    ResultTaken,
    Resumed,
    SessionClosed,
    SessionOpened,
    Submitted,
    What,
    WorkerGone,
    WorkerReady,
)
from triptych.types.kv_transfer import KvProgress
from triptych.types.outputs import OutputBatch
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import AttachRequest, SubmitRequest
from triptych_services.enginecore.frontends.handover import Handover
from triptych_services.enginecore.frontends.kept_requests import ChoiceKey, KeptRequests
from triptych_services.enginecore.frontends.news import NewsDesk
from triptych_services.enginecore.frontends.outputs import SessionOutputs
from triptych_services.enginecore.journal.listener import CallClock, EngineListener
from triptych_services.enginecore.kv.remote import without_useless_transfers
from triptych_services.enginecore.request import Request, check_vocabulary, largest_token
from triptych_services.enginecore.restrictions import Pause, Restrictions
from triptych_services.enginecore.scheduler.admission import check_config
from triptych_services.enginecore.scheduler.forecast import StepInterval
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.enginecore.scheduler.step_results import Failed, Finished
from triptych_services.enginecore.status import with_scheduler

log = logging.getLogger(__name__)


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
            listener: Hears of every call and decision; None: no listener, at no cost.

        Raises:
            ConfigError: Scheduler options cannot work together.
        """
        check_config(config.scheduler)
        self._config = config
        self._clock = CallClock(clock)
        self._listener = listener
        self._scheduler: Scheduler | None = None
        self._facts: WorkerFacts | None = None
        self._kept = KeptRequests(self._clock, config.engine.max_kept_bytes)
        self._outputs = SessionOutputs(self._kept)
        self._handover = Handover(self._kept, self._outputs, self._abort, self._clock)
        self._news = NewsDesk(clock, caches_prefixes=config.cache.enable_prefix_caching)
        self._restrictions = Restrictions()
        self._interrupted: dict[Request, int] = {}
        """Requests in flight when the worker was lost -> their positions. Empty once the next worker is there."""
        self._interval = StepInterval()

    @property
    def num_in_flight(self) -> int:
        """Number of steps sent whose results have not come."""
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
        self._start_call(WorkerReady, facts, after_crash)
        previous, before = self._scheduler, self._facts
        config = size_for_worker(self._config.scheduler, facts.max_num_seqs, facts.max_num_batched_tokens)
        check_config(config)
        num_stages = min(facts.num_stages, self._config.scheduler.steps_in_flight or facts.num_stages)
        self._scheduler = Scheduler(
            config,
            replace(facts, num_stages=num_stages),
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            clock=self._clock,
            kv_lease_s=self._config.engine.kv_lease_s,
        )
        self._facts = facts
        if previous is not None:
            self._note_failed(self._scheduler.adopt(previous))
        if after_crash and (suspect := self._restrictions.crashes.note_crash(self._interrupted)) is not None:
            why = "the worker died twice while it computed this request, the last time with no other suspect beside it"
            self._note_failed((self._scheduler.fail(suspect, EngineFailure(why)),))
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
        given_up = self._scheduler.requests_with_output()
        log.warning("%s: %d requests with output are given up", why, len(given_up))
        self._note_failed(tuple(self._scheduler.fail(each, EngineUnavailable(why)) for each in given_up))

    def worker_lost(self) -> None:
        """Let what runs wait again, with prompt and emitted tokens: no result will come for what is in flight."""
        self._start_call(WorkerGone)
        assert self._scheduler is not None, "a worker was lost that was never ready"
        self._interval.note_idle()
        self._interrupted = self._scheduler.requests_in_flight()
        self._scheduler.requeue_all()

    def open_session(self, session: int) -> list[OutputBatch]:
        """Begin to gather outputs for a frontend, and return its first batches, which say what is cached here."""
        self._start_call(SessionOpened, session)
        return self._outputs.open(session, self._news.take_base(self._scheduler) if self._scheduler else ())

    def close_session(self, session: int) -> None:
        """End all requests that a frontend reads, because it has left."""
        self._outputs.close(session)
        left = () if self._scheduler is None else self._scheduler.requests_of(session)
        if not self._handover.leave(session, left):
            self._start_call(SessionClosed, session)
            if self._scheduler is not None:
                self._scheduler.abort_session(session)

    def detach_session(self, session: int, lost_for_s: float = 0.0) -> None:
        """Keep the requests of a frontend that was lost so long ago, if they want it, and end the others."""
        self._outputs.close(session)
        left = () if self._scheduler is None else self._scheduler.requests_of(session)
        self._handover.detach(session, left, lost_for_s)

    def detach(self, session: int, number: int) -> None:
        """Let a choice wait for another frontend with all of its request, if it may be kept; else it ends."""
        self._clock.advance()
        self._handover.let_go(session, number)

    def attach(self, session: int, wish: AttachRequest) -> None:
        """Let a request of another session go on in this one. A refusal is an output of this session."""
        self._clock.advance()
        if self._outputs.is_open(session):
            self._handover.attach(session, wish, self._scheduler)

    def submit(self, session: int, submit: SubmitRequest) -> None:
        """Queue a request. A refusal is an output of its session, never an exception.

        A session that has ended meanwhile gets no output, so nothing happens.
        """
        self._start_call(Submitted, session, submit)
        if not self._outputs.is_open(session):
            return
        try:
            if submit.adapter:
                raise FeatureDisabled("adapter", f"{submit.adapter!r}: adapters are not served yet")
            if self._scheduler is None or self._facts is None:
                raise EngineUnavailable("the engine has no worker yet")
            check_vocabulary(submit, self._facts.model.vocab_size)
            submit = without_useless_transfers(submit, self._facts.kv_endpoint)
            remaining_ms = submit.deadline_remaining_ms
            deadline = None if remaining_ms is None else self._clock() + remaining_ms / 1000
            choices = Request.choices_of(submit, session=session, deadline=deadline)
            displaced = self._scheduler.add(*choices)
        except TriptychError as error:
            self.refuse(session, submit.numbers.tolist(), error)
        else:
            self._kept.add(session, submit, deadline)
            self._outputs.admit(session, submit.numbers.tolist(), whole_output=submit.whole_output)
            self._note_failed(displaced)
            log.debug(
                "request %s is queued: session %d, %d prompt tokens, %d choices, tenant %r, priority %d",
                submit.request_id,
                session,
                len(submit.prompt_token_ids),
                submit.num_choices,
                submit.tenant,
                submit.priority,
            )
            if submit.num_engine_deaths:
                self._restrictions.crashes.suspect(choices)

    def refuse(self, session: int, numbers: Sequence[int], error: TriptychError) -> None:
        """Answer the choices of a request that is not queued."""
        for number in numbers:
            self._outputs.refuse(session, number, error)

    def abort(self, session: int, number: int) -> None:
        """End a choice that no client waits for any more. One that has ended already is no error."""
        if (key := self._kept.submitted_as(ChoiceKey(session, number))) is not None:
            self._kept.forget_all_of(key)
            self._abort(key)

    def stop(self, session: int, number: int) -> None:
        """End a choice with what it has. If it may be kept, it is."""
        if (key := self._kept.submitted_as(ChoiceKey(session, number))) is not None:
            self._abort(key)

    def _abort(self, key: ChoiceKey) -> None:
        self._start_call(Aborted, *key)
        if self._scheduler is not None and (finished := self._scheduler.abort(*key)) is not None:
            self._note_finished((finished,))

    def release(self, within_s: float = 0.0) -> None:
        """Offer the requests that may not end within a time to their frontends, which may move them to other engines.

        They go on here until their frontends abort them.
        """
        if self._scheduler is not None:
            for request in self._scheduler.requests_beyond(within_s, self._interval.seconds):
                self._outputs.release(request.session, request.number)

    def note_kv_progress(self, progress: KvProgress) -> None:
        """Take in how far the worker's transfers of KV blocks have come."""
        self._start_call(KvProgressed, progress)
        if self._scheduler is not None:
            self._scheduler.transfers.note_progress(progress, self._clock())

    def expire(self) -> None:
        """End all requests with a deadline that has passed, and those that no frontend has come back for."""
        self._handover.expire()
        if self._scheduler is not None and self._scheduler.has_work:
            self._start_call(Expired)
            self._note_failed(self._scheduler.expired(self._clock()))

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute now."""
        self._clock.advance()
        try:
            plan = self._plan()
        except Exception:
            self._report(Planned(None))  # replayed, it fails in the same way
            raise
        if self._listener is not None:
            self._report(Planned(plan))
        return plan

    def apply(self, result: StepResult) -> None:
        """Take in one step's result. Its outputs wait for `take_outputs`.

        Raises:
            ProtocolViolation: It does not answer the oldest step in flight, or is no result of this model; nothing has
                changed.
        """
        self._start_call(ResultTaken, result)
        assert self._scheduler is not None, "a result came before any worker was ready"
        assert self._facts is not None
        if (worst := largest_token(result.token_ids)) >= self._facts.model.vocab_size:
            raise ProtocolViolation(f"result of step {result.step_id}: {worst} is not in the vocabulary")
        output = self._scheduler.update(result)
        self._outputs.add_step(output, result)
        self._note_finished(output.finished)
        self._note_failed(output.failed)
        self._interval.note_result(self._clock(), is_last=not self.num_in_flight)

    def take_outputs(self) -> dict[int, OutputBatch]:
        """Return, for each session with something due, what happened to its requests since its last batch."""
        if self._scheduler is None:
            return self._outputs.take(0)
        news = self._news.take(self._scheduler, len(self._outputs))
        return self._outputs.take(self._scheduler.num_free_places, news)

    @property
    def next_due_at(self) -> float:
        """When something comes due without a further call, in seconds of the clock; inf: nothing does.

        That is what `expire` ends, what `plan` tries again, or news that `take_outputs` returns.
        """
        due_at, scheduler = self._kept.next_expiry_at, self._scheduler
        if scheduler is not None:
            news_at = self._news.due_at(scheduler, len(self._outputs))
            due_at = min(due_at, scheduler.next_due_at, news_at)
        return due_at

    def pause(self, mode: PauseMode) -> None:
        """Compute no more than `mode` says, until `resume`. New requests queue. A second pause replaces the first."""
        self._start_call(Paused, mode)
        scheduler = self._scheduler
        if mode is PauseMode.ABORT and scheduler is not None:
            self._note_finished(scheduler.abort_all())
        started = scheduler.started if scheduler is not None and mode is PauseMode.WAIT else ()
        self._restrictions.pause = Pause(started, is_frozen=mode is PauseMode.KEEP)
        self._restrict()

    def resume(self) -> None:
        """End the pause, if there is one."""
        self._start_call(Resumed)
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
        self._start_call(CacheReset)
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
            journal=self._listener.state if self._listener else "off",
        )
        if (journal := self._listener) is not None:
            status = replace(
                status, journal_bytes=journal.num_bytes, journal_oldest_at_ms=journal.oldest_at_ms
            )
        if self._scheduler is None or self._facts is None:
            return status
        status = replace(status, num_kept=self._kept.num_unread)
        return with_scheduler(status, self._scheduler, self._facts.kv, now=self._clock())

    def close(self) -> None:
        """Report the end of the run to the listener. The last call."""
        if self._listener is not None:
            self._clock.advance()
            self._listener.close(self._clock.now_s)

    def _start_call(self, event: Callable[..., What], *fields: object) -> None:
        """Read the clock for a call, and report the call to the listener.

        Args:
            event: Class of the event.
            fields: Fields of the event.
        """
        self._clock.advance()
        if self._listener is not None:
            self._report(event(*fields))

    def _report(self, event: What) -> None:
        if self._listener is not None:
            self._listener.on_event(JournalEvent(self._clock.now_s, event))

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

    def _note_finished(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            self._outputs.finish(end)

    def _note_failed(self, failed: tuple[Failed, ...]) -> None:
        for end in failed:
            self._outputs.fail(end)
