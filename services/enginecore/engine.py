"""The engine core without its wires: requests in, plans out, results in, output batches out.

submit / abort ──► scheduler ──► plan() ──► worker
                      ▲                       │
take_outputs() ◄──────┴────── apply(result) ◄─┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from services.enginecore.frontends.outputs import SessionOutputs
from services.enginecore.request import Request
from services.enginecore.restrictions import Pause, Restrictions
from services.enginecore.scheduler import Failed, Finished, Scheduler, check_config
from triptych.config import EngineConfig
from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    FeatureDisabled,
    InvalidRequest,
    ProtocolViolation,
    TriptychError,
    WrongState,
)
from triptych.types.facts import EngineStatus, PauseMode, WorkerFacts
from triptych.types.outputs import OutputBatch
from triptych.types.step import U32, StepPlan, StepResult
from triptych.types.submit import SubmitRequest

log = logging.getLogger(__name__)

_STEP_WEIGHT = 0.05  # of the latest step in the moving average


class EngineCore:
    """Owned by the engine loop, called from nowhere else; does no I/O."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError: scheduler options that cannot work together."""
        check_config(config.scheduler)
        self._config = config
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._facts: WorkerFacts | None = None
        self._outputs = SessionOutputs()
        self._restrictions = Restrictions()
        self._interrupted: dict[Request, int] = {}
        """In flight when the worker was lost, with their positions, until the next one is there."""
        self._last_result_at: float | None = None
        self._step_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose results are not in."""
        return self._scheduler.num_in_flight if self._scheduler else 0

    @property
    def num_requests(self) -> int:
        scheduler = self._scheduler
        return scheduler.num_requests if scheduler else 0

    @property
    def scheduler(self) -> Scheduler | None:
        """For counters; None until a worker has been ready."""
        return self._scheduler

    def worker_ready(self, facts: WorkerFacts, *, after_crash: bool) -> None:
        """A worker has welcomed us, with no rows and no blocks: what ran before waits again.

        Args:
            after_crash: the last one died, so that something in flight may have killed it.

        Raises:
            ConfigError: this config cannot work with these facts; names both values.
        """
        previous = self._scheduler
        self._scheduler = Scheduler(
            config=self._config.scheduler,
            num_blocks=facts.kv.num_blocks,
            block_size=facts.kv.block_size,
            max_model_len=facts.model.max_model_len,
            eos_token_ids=facts.model.eos_token_ids,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            clock=self._clock,
        )
        self._facts = facts
        if previous is not None:
            self._note_failed(self._scheduler.adopt(previous))
        if after_crash and (suspect := self._restrictions.crashes.note_crash(self._interrupted)) is not None:
            why = "the worker died twice while it computed this request, the last time with no other suspect beside it"
            self._note_failed((self._scheduler.fail(suspect, EngineFailure(why)),))
        self._interrupted = {}
        self._restrict()

    def worker_lost(self) -> None:
        """No result will come for what is in flight: what runs waits again, with prompt and emitted tokens."""
        assert self._scheduler is not None, "a worker was lost that was never ready"
        self._last_result_at = None
        self._interrupted = self._scheduler.requests_in_flight()
        self._scheduler.requeue_all()

    def open_session(self, session: int) -> None:
        self._outputs.open(session)

    def close_session(self, session: int) -> None:
        """A frontend is gone: nobody waits for what it submitted."""
        if self._scheduler is not None:
            self._scheduler.abort_session(session)
        self._outputs.close(session)

    def submit(self, session: int, submit: SubmitRequest) -> None:
        """Queue a request; a refusal is an output of its session, never an exception.

        On a session that has ended meanwhile nothing happens: nobody would see the end of the request.
        """
        if not self._outputs.is_open(session):
            return
        try:
            if submit.adapter:
                raise FeatureDisabled("adapter", f"{submit.adapter!r}: adapters are not served yet")
            if self._scheduler is None or self._facts is None:
                raise EngineUnavailable("the engine has no worker yet")
            _check_vocabulary(submit, self._facts.model.vocab_size)
            remaining_ms = submit.deadline_remaining_ms
            deadline = None if remaining_ms is None else self._clock() + remaining_ms / 1000
            displaced = self._scheduler.add(*Request.choices_of(submit, session=session, deadline=deadline))
        except TriptychError as error:
            self.refuse(session, submit.numbers.tolist(), error)
        else:
            self._outputs.admit(session, submit.numbers.tolist(), whole_output=submit.whole_output)
            self._note_failed(displaced)

    def refuse(self, session: int, numbers: Sequence[int], error: TriptychError) -> None:
        """Answer the choices of a request that is not queued."""
        for number in numbers:
            self._outputs.fail(session, number, error)

    def abort(self, session: int, number: int) -> None:
        """End a request that nobody waits for any more; one that has ended already is no error."""
        if self._scheduler is not None and (finished := self._scheduler.abort(session, number)) is not None:
            self._note_finished((finished,))

    def expire(self) -> None:
        """End what has run out of time."""
        if self._scheduler is not None:
            self._note_failed(self._scheduler.expired(self._clock()))

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        if self._scheduler is None:
            return None
        if self._restrictions.crashes.has_suspects:
            self._restrictions.crashes.review()
            self._restrict()
        return self._scheduler.schedule()

    def apply(self, result: StepResult) -> None:
        """Take in one step's result; its outputs wait for `take_outputs`.

        Raises:
            ProtocolViolation: it does not answer the oldest step in flight, or is no result of this model;
                nothing has changed.
        """
        assert self._scheduler is not None, "a result came before any worker was ready"
        assert self._facts is not None
        if (worst := _largest(result.token_ids)) >= self._facts.model.vocab_size:
            raise ProtocolViolation(f"result of step {result.step_id}: {worst} is not in the vocabulary")
        output = self._scheduler.update(result)
        self._outputs.add_step(output, result)
        self._note_finished(output.finished)
        self._note_failed(output.failed)
        self._measure_step()

    def take_outputs(self) -> dict[int, OutputBatch]:
        """Session to what happened to its requests since its last batch, where somebody waits for it."""
        return self._outputs.take(self._scheduler.num_free_places if self._scheduler else 0)

    def pause(self, mode: PauseMode) -> None:
        """Plan no more than `mode` says, until `resume`; new requests queue. A second pause replaces the first."""
        scheduler = self._scheduler
        if mode is PauseMode.ABORT and scheduler is not None:
            self._note_finished(scheduler.abort_all())
        started = scheduler.started if scheduler is not None and mode is PauseMode.WAIT else ()
        self._restrictions.pause = Pause(started, is_frozen=mode is PauseMode.KEEP)
        self._restrict()

    def resume(self) -> None:
        """Go on as if there had been no pause."""
        self._restrictions.pause = None
        self._restrict()

    @property
    def is_paused(self) -> bool:
        return self._restrictions.pause is not None

    @property
    def is_settling(self) -> bool:
        """A pause has been asked for, and something that it lets finish has not."""
        pause = self._restrictions.pause
        return pause is not None and not pause.is_settled(self.num_in_flight)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks lost their content.

        Raises:
            WrongState: blocks are in use.
            EngineUnavailable: no worker has been ready yet.
        """
        if self._scheduler is None:
            raise EngineUnavailable("the engine has no worker yet")
        before = self._scheduler.snapshot()
        if not self._scheduler.reset_prefix_cache():
            raise WrongState(
                f"ResetPrefixCache: {before.num_used_blocks} blocks are in use; try again when no request runs"
            )
        return before.num_cached_blocks

    def status(self, *, ready: bool, why_not_ready: str, steps_in_flight: int) -> EngineStatus:
        status = EngineStatus(
            engine_id=self._config.engine.engine_id,
            ready=ready,
            why_not_ready=why_not_ready,
            steps_in_flight=steps_in_flight,
            step_ns=int(self._step_s * 1e9),
            paused=self.is_paused,
        )
        if self._scheduler is None:
            return status
        snapshot = self._scheduler.snapshot()
        return replace(
            status,
            num_running=len(snapshot.running),
            num_waiting=len(snapshot.waiting),
            num_blocks=snapshot.num_blocks,
            num_used_blocks=snapshot.num_used_blocks,
            num_cached_blocks=snapshot.num_cached_blocks,
            **asdict(snapshot.counters),
        )

    def close(self) -> None:
        """No call comes after this one: for an engine that keeps a journal."""

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
            self._outputs.fail(end.request.session, end.request.number, end.error)

    def _measure_step(self) -> None:
        """Moving average of the time between two results while steps follow each other."""
        now = self._clock()
        if self._last_result_at is not None:
            interval = now - self._last_result_at
            self._step_s += _STEP_WEIGHT * (interval - self._step_s) if self._step_s else interval
        self._last_result_at = now if self.num_in_flight else None


def _check_vocabulary(submit: SubmitRequest, vocab_size: int) -> None:
    """The frontend has looked already; one id beyond the embedding would cost all requests their worker."""
    worst = max(map(_largest, (submit.prompt_token_ids, *submit.emitted)))
    if worst >= vocab_size:
        raise InvalidRequest("token_ids", f"{worst} is not in the vocabulary, 0..{vocab_size - 1}")


def _largest(token_ids: U32) -> int:
    """-1 of none."""
    return int(token_ids.max()) if len(token_ids) else -1
