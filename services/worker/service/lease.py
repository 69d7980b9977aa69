"""Who may send steps: one engine at a time, and never one whose place another has taken.

hello -> refused: not ready, stale epoch, held by a living engine, config differs, protocol unknown
      -> resumed: the same engine, its session still here
      -> fresh:   anyone else whose turn it is
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.service.hello import EngineHello
from services.worker.service.runner_thread import RunnerThread
from services.worker.service.session import Session, StepStream
from services.worker.service.status import StatusPublisher, WorkerState
from triptych.config.shared import check_shared
from triptych.errors import (
    EngineUnavailable,
    HandshakeMismatch,
    ProtocolViolation,
    StaleEpoch,
    WorkerAsleep,
    WorkerHeld,
)
from triptych.rpc.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S
from triptych.types.facts import Phase, WorkerFacts
from triptych.wire.worker import PROTOCOL_VERSION

log = logging.getLogger(__name__)

# The engine gives a lost session up first: it must not come back for rows that are being freed. The two ends of a
# connection that carries nothing notice it at different times: within keepalive time and timeout of each other.
_GRACE_S = KEEPALIVE_TIME_S + KEEPALIVE_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine that was let in."""

    session: Session
    stream: StepStream
    is_resumed: bool


class WorkerLease:
    """Owned by the worker's event loop."""

    def __init__(
        self,
        status_publisher: StatusPublisher,
        thread: RunnerThread,
        shared_config: Mapping[str, str],
        *,
        resume_ttl_s: float,
    ) -> None:
        """`resume_ttl_s`: how long the engine tries to resume; its rows are kept a little longer."""
        self._status_publisher = status_publisher
        self._thread = thread
        self._shared_config = shared_config
        self.resume_ttl_s = resume_ttl_s
        self._keep_s = resume_ttl_s + _GRACE_S
        self._loop = asyncio.get_running_loop()
        self._holder: Session | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._fence: EngineHello | None = None
        """Of the highest epoch that was ever admitted: lower ones have been replaced."""

    @property
    def num_in_flight(self) -> int:
        return self._holder.num_in_flight if self._holder else 0

    def drain(self) -> None:
        """Let the steps in flight be the last ones."""
        if self._holder is not None:
            self._holder.drain()

    def open(self, hello: EngineHello) -> Entry:
        """Admit an engine. One that dials again takes its own place: its first stream is broken, and this
        side may learn of it much later.

        Raises:
            WorkerAsleep: until somebody wakes it.
            EngineUnavailable: not ready yet; says how far it is.
            StaleEpoch: an engine that started later has taken this one's place.
            WorkerHeld: another engine's stream is open; names it.
            HandshakeMismatch: protocol, fingerprint or config differ; names them.
        """
        state = self._status_publisher.state
        if state.phase == Phase.ASLEEP:
            raise WorkerAsleep(
                "the worker is asleep; AdminService.Wake, asked of an engine that dials it, wakes it"
            )
        if not state.is_ready or state.facts is None:
            raise EngineUnavailable(f"the worker is {state.phase} ({state.progress:.0%})")
        self._check_turn(hello)
        _check_hello(hello, state, self._shared_config)
        self._cancel_expiry()
        session = self._holder
        is_known = session is not None and session.name == hello.resume_session
        if session is not None and is_known and session.can_resume(hello.last_result_seen):
            return Entry(session, session.attach(hello.last_result_seen), is_resumed=True)
        return self._begin(hello, state.facts)

    def dismiss(self, session_name: str) -> None:
        """End the session of this name because the worker goes to sleep.

        Raises:
            WorkerHeld: another session holds the worker; names its engine.
            EngineUnavailable: none does: it is over; or the worker is not ready.
            ProtocolViolation: a step is in flight in it.
        """
        session, state = self._holder, self._status_publisher.state
        if not state.is_ready:
            raise EngineUnavailable(f"the worker is {state.phase}")
        if session is None:
            raise EngineUnavailable(
                f"session {session_name!r} is over, and whoever had it holds this worker no more"
            )
        if session.name != session_name:
            raise WorkerHeld(f"this worker is held by {session.hello}, which alone may put it to sleep")
        if session.num_in_flight:
            raise ProtocolViolation(f"{session.num_in_flight} steps are in flight; sleep when they are back")
        self._cancel_expiry()
        session.dismiss()
        self._end(session)

    def leave(self, entry: Entry) -> None:
        """A stream has ended. Its session stays for a while, unless there is nothing left to go on with."""
        session = entry.session
        if session.stream is not entry.stream:
            return  # another has replaced it
        session.stream = None
        if session.is_over:
            log.info("%s left", session.hello)
            self._end(session)
            return
        log.info("%s is away: its rows are kept for %g s", session.hello, self._keep_s)
        self._expiry = self._loop.call_later(self._keep_s, self._expire, session)

    def _check_turn(self, hello: EngineHello) -> None:
        holder, fence = self._holder, self._fence
        if holder is not None and holder.hello.is_of_same_engine(hello):
            return
        is_held = holder is not None and holder.stream is not None
        has_held = bool(
            hello.resume_session
        )  # a standby may wait beside the holder, one it has replaced may not
        if fence is not None and hello.epoch < fence.epoch and (has_held or not is_held):
            raise StaleEpoch(
                f"{hello} is stale: {fence}, which started later, has taken its place at this worker. "
                "Start the engine again if it should serve (and see to its clock if it has just been started)"
            )
        if holder is not None and (is_held or hello.epoch == holder.hello.epoch):
            raise WorkerHeld(
                f"this worker is held by {holder.hello}; it serves one engine at a time: "
                f"stop that engine, or give {hello} another worker"
            )

    def _begin(self, hello: EngineHello, facts: WorkerFacts) -> Entry:
        if self._holder is not None:
            self._holder.supersede(hello)
        self._fence = hello
        self._holder = session = Session(hello, facts, self._thread)
        self._status_publisher.change(held_by=str(hello))
        return Entry(session, session.attach(), is_resumed=False)

    def _expire(self, session: Session) -> None:
        log.warning("%s has not come back: its rows are freed", session.hello)
        self._expiry = None
        self._end(session)

    def _end(self, session: Session) -> None:
        session.close()
        if session is self._holder:
            self._holder = None
            self._status_publisher.change(held_by="")

    def _cancel_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def _check_hello(hello: EngineHello, state: WorkerState, shared_config: Mapping[str, str]) -> None:
    """Raises HandshakeMismatch naming what differs, with both values."""
    assert state.facts is not None, "the worker is ready"
    if not hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol:
        raise HandshakeMismatch(
            f"protocol: engine speaks {hello.min_protocol}..{hello.max_protocol}, worker {PROTOCOL_VERSION}"
        )
    if hello.steps_in_flight < 1:
        raise HandshakeMismatch(
            f"window: {hello.steps_in_flight} steps in flight compute nothing; ask for 1 at least"
        )
    check_shared(engine=hello.shared_config, worker=shared_config)
    if hello.fingerprint and hello.fingerprint != state.facts.model.fingerprint:
        raise HandshakeMismatch(
            f"fingerprint: engine expects {hello.fingerprint}, worker has {state.facts.model.fingerprint}"
        )
