"""One engine's steps, from a new session to its end: taken in order, each computed once.

    step ─► the last one + 1: computed. An earlier one: its stored result is sent again. Any other: refused, no effect.

A result is kept until the engine has it. Streams come and go; the session stays (docs/wire.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from triptych.errors import EngineFailure, EngineUnavailable, ProtocolViolation
from triptych.rpc.session.handshake import Agreement, SessionTerms
from triptych.rpc.session.lease import SessionLease
from triptych.rpc.session.outbox import Outbox
from triptych.rpc.session.replay_buffer import is_repeated
from triptych.types.facts import WorkerFacts
from triptych.types.kv_transfer import KvProgress
from triptych.types.step import StepResult
from triptych.wire.step import Step, StepDecoder
from triptych_services.worker.kv_transfer.service import KvTransferService
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.step_orders import StepOrders

_SHOWN_CHARS = 13  # of a boot id, as after the first two groups of a UUID


@dataclass(frozen=True, slots=True)
class EngineHello:
    """The engine that opens a step stream, and what it expects; without gRPC."""

    engine_id: str
    boot_id: str
    """Drawn at the engine's start."""
    fingerprint: str
    """Fingerprint of the model that the engine expects. Empty: any."""
    shared_config: Mapping[str, str]
    max_steps_in_flight: int
    agreement: Agreement
    resume_session: str = ""
    """Empty: begin a new session."""
    last_result_seen: int = 0
    """To resume: the last step with a result that the engine holds."""
    last_session: str = ""
    """Name of the last session that this engine was granted. Empty: none."""

    def is_of_same_engine(self, other: EngineHello) -> bool:
        """Return whether both come from the same process."""
        return (self.engine_id, self.boot_id) == (other.engine_id, other.boot_id)

    def __str__(self) -> str:
        return f"engine {self.engine_id} (boot {self.boot_id[:_SHOWN_CHARS]})"


class DrainNotice:
    """Says that the worker takes no more steps."""


Notice = DrainNotice | KvProgress
Outcome = StepResult | Notice


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """A stream by which an engine holds the worker."""

    session: Session
    stream: int
    """Its number among the session's streams."""
    outcomes: AsyncIterator[Outcome]
    """Outcomes to be sent on the stream. Raises the error that ends it."""
    terms: SessionTerms

    def submit(self, step: Step) -> None:
        """Queue one step as `Session.submit` does. A stream that was replaced brings nothing."""
        if self.session.lease.stream == self.stream:
            self.session.submit(step)

    def leave(self) -> None:
        """Note that the engine has said goodbye: its session ends."""
        if self.session.lease.stream == self.stream:
            self.session.outbox.close()

    def end_stream(self, error: Exception | None) -> None:
        """Note that nothing more can be read from this stream, and why. The session can be resumed."""
        if self.session.lease.stream == self.stream:
            self.session.outbox.stop_reading(error)


class Session:
    """The rows in the runner that one engine fills. Owned by the worker's lease."""

    def __init__(
        self,
        hello: EngineHello,
        facts: WorkerFacts,
        thread: RunnerThread,
        *,
        keep_s: float,
        on_expired: Callable[[Session], None],
        kv_transfers: KvTransferService | None = None,
    ) -> None:
        """
        Args:
            kv_transfers: None: the worker takes no part in transfers of KV blocks.
            keep_s: For how long the session outlives a stream, in seconds.
            on_expired: Called with the session when it has been without a stream for so long.
        """
        self.hello = hello
        self.facts = facts
        self.max_steps_in_flight = min(hello.max_steps_in_flight, facts.max_steps_in_flight)
        self.outbox: Outbox[StepResult, Notice] = Outbox()
        """Results by step id. At most twice `max_steps_in_flight` are kept."""
        self.lease = SessionLease(keep_s=keep_s, on_expired=lambda: on_expired(self))
        self.last_step_received = 0
        self._decoder = StepDecoder()
        self._thread = thread
        self._step_orders = StepOrders()
        self.epoch = thread.open_session(self._on_outcome, lambda: self._step_orders.note_computed(0))
        """Counts this worker's sessions: of two engines that were granted one, the higher has the worker."""
        self.name = f"{facts.boot_id}/{self.epoch}"
        self._is_draining = False
        self._transfers = (
            None
            if kv_transfers is None
            else kv_transfers.open_session(self._on_kv_progress, self._step_orders)
        )

    @property
    def num_in_flight(self) -> int:
        """Steps received and not completed."""
        return 0 if self.outbox.is_closed else self.last_step_received - self.outbox.last_number

    @property
    def is_over(self) -> bool:
        """Whether a later stream would find nothing to go on with."""
        return self.outbox.is_closed or self._is_draining

    def can_resume(self, last_result_seen: int) -> bool:
        """Return whether an engine that holds the results up to this step loses nothing by going on here."""
        return not self._is_draining and self.outbox.can_resume_after(last_result_seen)

    def attach(self, resume_ttl_s: float, *, last_result_seen: int = 0, is_resumed: bool = False) -> Grant:
        """Give the session to a new stream, which begins with the results that the engine has not seen."""
        self.outbox.confirm(last_result_seen)
        if is_resumed and self._transfers is not None:
            self._transfers.report()
        terms = SessionTerms(
            self.name, is_resumed, self.last_step_received, resume_ttl_s, self.hello.agreement
        )
        return Grant(self, self.lease.attach(), self.outbox.messages(), terms)

    def submit(self, step: Step) -> None:
        """Queue one step. A session that drains drops a new one, and the engine plans it elsewhere.

        Raises:
            SequenceGap: It is not the step after the last one. It had no effect.
            ProtocolViolation: Too many steps are in flight, or results are acknowledged that do not exist, or the
                message is no plan. It had no effect.
        """
        if self._is_draining and step.step_id > self.last_step_received:
            return
        if is_repeated(step.step_id, self.last_step_received, "step"):
            self.outbox.repeat(step.step_id)
            return
        num_completed = self.outbox.last_number
        if self.last_step_received - num_completed >= self.max_steps_in_flight:
            raise ProtocolViolation(
                f"step {step.step_id} exceeds the limit of {self.max_steps_in_flight} steps in flight"
            )
        if step.last_result_seen > num_completed:
            raise ProtocolViolation(
                f"last_result_seen: {step.last_result_seen} is above {num_completed}, the last step completed"
            )
        plan = self._decoder.decode(step)
        if self._transfers is not None:
            self._transfers.begin_step(plan)
        self.outbox.confirm(plan.last_result_seen)
        self.last_step_received = plan.step_id
        self._thread.submit(self.epoch, plan, step)

    def drain(self) -> None:
        """Take no more steps. The stream ends behind the results of those in flight."""
        self._is_draining = True
        self.outbox.notify(DrainNotice())
        self._end_if_drained()

    def end(self, error: Exception | None = None) -> None:
        """End the session and its stream, with `error` if that is given. Steps that have not begun are dropped."""
        self.outbox.close(error)
        self.lease.end()
        self._end_orders()
        self._thread.close_session(self.epoch)

    def _on_outcome(self, outcome: StepResult | Exception) -> None:
        """Take what a step has come to. Called on the event loop, in order."""
        due = self.outbox.last_number + 1
        if isinstance(outcome, StepResult) and outcome.step_id != due:
            outcome = EngineFailure(f"the runner answered step {outcome.step_id}, but step {due} is due")
        if isinstance(outcome, Exception):
            self._thread.close_session(self.epoch)
            self._end_orders()
            self.outbox.close(outcome)
            return
        if self._transfers is not None:
            self._transfers.note_errors(outcome)
        self._step_orders.note_computed(outcome.step_id)
        self.outbox.put(outcome)
        self._end_if_drained()

    def _on_kv_progress(self, progress: KvProgress) -> None:
        if not self._is_draining:  # else it would take the place of the notice that says so
            self.outbox.notify(progress)

    def _end_orders(self) -> None:
        self._step_orders.close()
        if self._transfers is not None:
            self._transfers.close()

    def _end_if_drained(self) -> None:
        if self._is_draining and not self.num_in_flight:
            self.outbox.close(EngineUnavailable("the worker is stopping"))
