"""One engine's steps, from a fresh welcome to a goodbye: taken in order, each computed once, its result kept
until the engine has it. Streams come and go; the session stays.

step -> the last one + 1: computed. One of before: its stored result again. Any other: refused, and no effect.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.worker.service.hello import EngineHello
from services.worker.service.runner_thread import RunnerThread
from triptych.errors import EngineFailure, EngineUnavailable, ProtocolViolation, SequenceGap, WorkerAsleep
from triptych.types.facts import WorkerFacts
from triptych.types.step import StepResult
from triptych.wire.worker import Step, StepDecoder


@dataclass(frozen=True, slots=True)
class SessionState:
    """How far a session is; its welcome tells the engine."""

    last_step_received: int = 0
    last_step_completed: int = 0


class DrainNotice:
    """Stands among the results where the worker stopped taking steps."""


Outcome = StepResult | DrainNotice


class StepStream:
    """One stream's half of a session: steps in, results out. Owned by the door's handler."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._outcomes: asyncio.Queue[Outcome | Exception | None] = asyncio.Queue()

    def submit(self, step: Step) -> None:
        """See `Session.submit`; of a stream that another has replaced nothing is taken any more."""
        if self.session.stream is self:
            self.session.submit(step)

    def leave(self) -> None:
        """The engine has said goodbye on this stream."""
        if self.session.stream is self:
            self.session.leave()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.put_nowait(outcome)

    def end(self, error: Exception | None) -> None:
        """Nothing follows what is queued; `error` says why, None that there is nothing to say."""
        self._outcomes.put_nowait(error)

    async def next_outcome(self) -> Outcome | None:
        """The next result or notice; None at the end. Raises what ended the stream, if that was an error."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Session:
    """Rows in the runner that one engine fills. Owned by the gate."""

    def __init__(self, hello: EngineHello, facts: WorkerFacts, thread: RunnerThread) -> None:
        self.hello = hello
        self.facts = facts
        self.steps_in_flight = min(hello.steps_in_flight, facts.max_steps_in_flight)
        self.stream: StepStream | None = None
        """The one that lives; None while the engine is away."""
        self._decoder = StepDecoder()
        self._thread = thread
        self._number = thread.open_session(self._take)
        self.name = f"{facts.boot_id}/{self._number}"
        self._last_received = self._last_completed = self._last_acknowledged = 0
        self._results: dict[int, StepResult] = {}  # completed and not acknowledged: twice the window at most
        self._failure: Exception | None = None
        self._is_draining = False
        self._has_left = False

    @property
    def state(self) -> SessionState:
        return SessionState(self._last_received, self._last_completed)

    @property
    def num_in_flight(self) -> int:
        """Steps received and not completed."""
        return 0 if self._failure is not None else self._last_received - self._last_completed

    @property
    def is_over(self) -> bool:
        """There is nothing that a later stream could go on with."""
        return self._has_left or self._is_draining or self._failure is not None

    def can_resume(self, last_result_seen: int) -> bool:
        """Whether an engine that holds results up to this step can go on here with nothing lost."""
        is_kept = self._last_acknowledged <= last_result_seen <= self._last_completed
        return is_kept and not self.is_over

    def attach(self, last_result_seen: int = 0) -> StepStream:
        """Go on over a new stream; what the engine has not seen is sent first."""
        self._hang_up(self.hello)
        self._acknowledge(last_result_seen)
        self.stream = StepStream(self)
        for result in self._results.values():
            self.stream.put(result)
        return self.stream

    def submit(self, step: Step) -> None:
        """Queue one step; while the session drains a new one is dropped, and the engine plans it elsewhere.

        Raises:
            SequenceGap: not the step after the last one; it had no effect.
            ProtocolViolation: more than the window in flight, results acknowledged that do not exist, or a message that
                is no plan; it had no effect.
        """
        if step.step_id <= self._last_received:
            if (result := self._results.get(step.step_id)) is not None and self.stream is not None:
                self.stream.put(result)
            return  # else it is being computed, and its result will come; or the engine has it
        if self._is_draining:
            return
        if step.step_id != self._last_received + 1:
            raise SequenceGap(f"step {step.step_id} after step {self._last_received}")
        if self._last_received - self._last_completed >= self.steps_in_flight:
            raise ProtocolViolation(
                f"step {step.step_id} exceeds the window of {self.steps_in_flight} steps in flight"
            )
        if step.last_result_seen > self._last_completed:
            raise ProtocolViolation(
                f"last_result_seen: {step.last_result_seen} is above {self._last_completed}, the last step completed"
            )
        plan = self._decoder.decode(step)
        self._acknowledge(plan.last_result_seen)
        self._last_received = plan.step_id
        self._thread.submit(self._number, plan)

    def leave(self) -> None:
        """The engine says goodbye: its rows go with its stream."""
        self._has_left = True
        if self.stream is not None:
            self.stream.end(None)

    def drain(self) -> None:
        """Take no more steps; the stream ends behind the results of those in flight."""
        self._is_draining = True
        if self.stream is not None:
            self.stream.put(DrainNotice())
        self._end_if_drained()

    def supersede(self, successor: EngineHello) -> None:
        """Another session, of the same engine or of one that started later, begins."""
        self._hang_up(successor)
        self.close()

    def dismiss(self) -> None:
        """The worker goes to sleep; the stream ends."""
        if self.stream is not None:
            self.stream.end(WorkerAsleep("the worker goes to sleep"))
            self.stream = None

    def close(self) -> None:
        """Forget it all: steps that have not begun are never computed."""
        self._thread.close_session(self._number)

    def _hang_up(self, caller: EngineHello) -> None:
        if self.stream is not None:
            self.stream.end(ProtocolViolation(f"{caller} has dialled again"))
            self.stream = None

    def _take(self, outcome: StepResult | Exception) -> None:
        """From the runner thread, by way of the event loop, in order."""
        if isinstance(outcome, StepResult) and outcome.step_id != self._last_completed + 1:
            due = self._last_completed + 1
            outcome = EngineFailure(f"the runner answered step {outcome.step_id}, but step {due} is due")
        if isinstance(outcome, Exception):
            self._failure = outcome
            self._thread.close_session(self._number)
            if self.stream is not None:
                self.stream.end(outcome)
            return
        self._last_completed = outcome.step_id
        self._results[outcome.step_id] = outcome
        if self.stream is not None:
            self.stream.put(outcome)
        self._end_if_drained()

    def _acknowledge(self, last_result_seen: int) -> None:
        for step_id in range(self._last_acknowledged + 1, last_result_seen + 1):
            del self._results[step_id]
        self._last_acknowledged = max(self._last_acknowledged, last_result_seen)

    def _end_if_drained(self) -> None:
        if self._is_draining and not self.num_in_flight and self.stream is not None:
            self.stream.end(EngineUnavailable("the worker is stopping"))
