"""Who may send steps, and in which order: the worker's side of the step protocol, without gRPC.

hello -> admitted, or refused: not ready, held by a living engine, config differs, protocol unknown
step  -> must be the last one + 1, and fit into the window
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.info import InfoBoard
from services.worker.runner_thread import RunnerThread
from triptych.config.shared import check_shared
from triptych.errors import EngineUnavailable, HandshakeMismatch, ProtocolViolation, WorkerHeld
from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult
from triptych.wire.worker import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class EngineHello:
    """Who calls, and what it expects."""

    engine_id: str
    epoch: int
    min_protocol: int
    max_protocol: int
    fingerprint: str
    """Empty: whatever the worker has."""
    shared_config: Mapping[str, str]
    window: int

    def is_of_same_engine(self, other: EngineHello) -> bool:
        """The same process: an epoch is drawn at its start."""
        return (self.engine_id, self.epoch) == (other.engine_id, other.epoch)

    def __str__(self) -> str:
        return f"engine {self.engine_id} (epoch {self.epoch})"


class Session:
    """One engine's step stream, from its welcome to its end. Owned by the door's handler."""

    def __init__(self, hello: EngineHello, facts: WorkerFacts, thread: RunnerThread) -> None:
        self.hello = hello
        self.facts = facts
        self.window = min(hello.window, facts.max_window)
        self._thread = thread
        self._results: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()
        self._number = thread.open_session(self._results.put_nowait)
        self._last_step = 0
        self._is_draining = False
        self.num_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        """Queue one step; while the session drains it is dropped, and the engine plans it anew elsewhere.

        Raises:
            ProtocolViolation: not the step after the last one, or more than the window in flight.
        """
        if self._is_draining:
            return
        if plan.step_id != self._last_step + 1:
            raise ProtocolViolation(f"STEP_GAP: step {plan.step_id} after step {self._last_step}")
        if self.num_in_flight >= self.window:
            raise ProtocolViolation(
                f"step {plan.step_id} exceeds the window of {self.window} steps in flight"
            )
        self._last_step = plan.step_id
        self.num_in_flight += 1
        self._thread.submit(self._number, plan)

    def drain(self) -> None:
        """Take no more steps; the stream ends behind the results of those in flight."""
        self._is_draining = True
        self._end_if_drained()

    def end(self, error: Exception | None) -> None:
        """No more steps will come; `error` says why, None that the engine left in order."""
        self._results.put_nowait(error)

    async def next_result(self) -> StepResult | None:
        """The next result, in order; None at the end. Raises what a step, or the stream, raised."""
        outcome = await self._results.get()
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            self.num_in_flight -= 1
            self._end_if_drained()
        return outcome

    def _end_if_drained(self) -> None:
        if self._is_draining and not self.num_in_flight:
            self.end(EngineUnavailable("the worker is stopping"))

    def close(self) -> None:
        self._thread.close_session(self._number)


class SessionGate:
    """Lets one engine in at a time. Owned by the worker's event loop."""

    def __init__(self, board: InfoBoard, thread: RunnerThread, shared_config: Mapping[str, str]) -> None:
        self._board = board
        self._thread = thread
        self._shared_config = shared_config
        self._holder: Session | None = None

    @property
    def num_in_flight(self) -> int:
        return self._holder.num_in_flight if self._holder else 0

    def drain(self) -> None:
        """Let the steps in flight be the last ones."""
        if self._holder is not None:
            self._holder.drain()

    def open(self, hello: EngineHello) -> Session:
        """Admit an engine. One that dials again takes its own place: its first stream is broken, and this
        side may learn of it much later.

        Raises:
            EngineUnavailable: not ready yet; says how far it is.
            WorkerHeld: another engine's stream is open; names it.
            HandshakeMismatch: protocol, fingerprint or config differ; names them.
        """
        state = self._board.state
        if not state.is_ready or state.facts is None:
            raise EngineUnavailable(f"the worker is {state.phase} ({state.progress:.0%})")
        if self._holder is not None and not self._holder.hello.is_of_same_engine(hello):
            raise WorkerHeld(
                f"this worker is held by {self._holder.hello}; it serves one engine at a time: "
                f"stop that engine, or give {hello} another worker"
            )
        if not hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol:
            raise HandshakeMismatch(
                f"protocol: engine speaks {hello.min_protocol}..{hello.max_protocol}, worker {PROTOCOL_VERSION}"
            )
        if hello.window < 1:
            raise HandshakeMismatch(
                f"window: {hello.window} steps in flight compute nothing; ask for 1 at least"
            )
        check_shared(engine=hello.shared_config, worker=self._shared_config)
        if hello.fingerprint and hello.fingerprint != state.facts.model.fingerprint:
            raise HandshakeMismatch(
                f"fingerprint: engine expects {hello.fingerprint}, worker has {state.facts.model.fingerprint}"
            )
        if self._holder is not None:
            self._holder.end(ProtocolViolation(f"{hello} has dialled again"))
        self._holder = Session(hello, state.facts, self._thread)
        self._board.change(held_by=str(hello))
        return self._holder

    def close(self, session: Session) -> None:
        session.close()
        if session is self._holder:
            self._holder = None
            self._board.change(held_by="")
