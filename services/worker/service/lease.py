"""Which engine may send steps: one at a time, and never one that a later engine has replaced.

hello ─► refused: not ready, replaced, held by another engine that lives, config differs
      ─► resumed: the same engine, and its session is still here
      ─► a new session: any other engine that may have the worker now
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from triptych.config.loader import check_same_values
from triptych.errors import (
    EngineUnavailable,
    HandshakeMismatch,
    ProtocolViolation,
    StaleEpoch,
    WorkerAsleep,
    WorkerHeld,
)
from triptych.rpc.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S
from triptych.rpc.session.handshake import WORKER_PROTOCOL, check_kv_groups
from triptych.types.facts import Phase, WorkerFacts
from triptych.types.identity import Likeness, ModelIdentity, compare
from triptych_services.worker.kv_transfer.service import KvTransferService
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.session import EngineHello, Grant, Session
from triptych_services.worker.service.status import StatusPublisher, WorkerState

log = logging.getLogger(__name__)

# The engine gives a lost session up first: it must not come back for rows that are being freed. The two ends of a
# connection that carries nothing notice it at different times: within keepalive time and timeout of each other.
_GRACE_S = KEEPALIVE_TIME_S + KEEPALIVE_TIMEOUT_S


class WorkerLease:
    """The claim of one engine to this worker. Owned by the worker's event loop."""

    def __init__(
        self,
        status_publisher: StatusPublisher,
        thread: RunnerThread,
        shared_config: Mapping[str, str],
        *,
        resume_ttl_s: float,
    ) -> None:
        """`resume_ttl_s`: how long the engine tries to resume its session, which is kept a little longer."""
        self._status_publisher = status_publisher
        self._thread = thread
        self._shared_config = shared_config
        self._resume_ttl_s = resume_ttl_s
        self._keep_s = resume_ttl_s + _GRACE_S
        self._session: Session | None = None
        """Session of the engine that holds the worker, or None."""
        self._last_holder: EngineHello | None = None
        """The engine that was granted the last session, alive or not. Those of earlier ones are stale."""
        self.kv_transfers: KvTransferService | None = None
        """Set once by the app, when the runner is ready; None: the worker takes no part in them."""

    @property
    def num_in_flight(self) -> int:
        """Steps received and not completed."""
        return self._session.num_in_flight if self._session else 0

    def drain(self) -> None:
        """Let the steps in flight be the last ones."""
        if self._session is not None:
            self._session.drain()

    def open(self, hello: EngineHello) -> Grant:
        """Give the worker to an engine.

        An engine that dials again replaces its own stream: it is broken, and this side may learn of it much later.

        Raises:
            WorkerAsleep: The worker sleeps until an operator wakes it.
            EngineUnavailable: The worker is not ready yet; says how far it is.
            StaleEpoch: Another engine has replaced this one.
            WorkerHeld: Another engine's stream is open; names it.
            HandshakeMismatch: Fingerprint or config differ; names them.
        """
        state = self._status_publisher.state
        if state.phase == Phase.ASLEEP:
            raise WorkerAsleep(
                "the worker is asleep; AdminService.Wake, asked of an engine that dials it, wakes it"
            )
        if not state.is_ready or state.facts is None:
            raise EngineUnavailable(f"the worker is {state.phase} ({state.progress:.0%})")
        self._check_turn(hello, state.facts.boot_id)
        _check_hello(hello, state, self._shared_config)
        session, last_seen = self._session, hello.last_result_seen
        if session is None or session.name != hello.resume_session or not session.can_resume(last_seen):
            return self._begin(hello, state.facts)
        return session.attach(self._resume_ttl_s, last_result_seen=last_seen, is_resumed=True)

    def end(self, session_name: str) -> None:
        """End the session of this name because the worker goes to sleep.

        Raises:
            WorkerHeld: Another session holds the worker; names its engine.
            EngineUnavailable: The session has ended, or the worker is not ready.
            ProtocolViolation: A step is in flight in it.
        """
        session, state = self._session, self._status_publisher.state
        if not state.is_ready:
            raise EngineUnavailable(f"the worker is {state.phase}")
        if session is None:
            raise EngineUnavailable(f"session {session_name!r} has ended; reconnect to begin a new one")
        if session.name != session_name:
            raise WorkerHeld(f"this worker is held by {session.hello}; only that engine may put it to sleep")
        if session.num_in_flight:
            raise ProtocolViolation(f"{session.num_in_flight} steps are in flight; sleep when they are back")
        self._end(session, WorkerAsleep("the worker goes to sleep"))

    def release(self, grant: Grant) -> None:
        """Note that a stream has ended. Its session waits for the next one, unless there is nothing to go on with."""
        session = grant.session
        if not session.lease.detach(grant.stream):
            return
        session.outbox.stop_reading()
        if session.is_over:
            log.info("%s left", session.hello)
            self._end(session)
        else:
            log.info("%s is away: its rows are kept for %g s", session.hello, self._keep_s)

    def _check_turn(self, hello: EngineHello, boot_id: str) -> None:
        session, last_holder = self._session, self._last_holder
        if last_holder is None or last_holder.is_of_same_engine(hello):
            return
        if hello.last_session.startswith(f"{boot_id}/"):  # it has held this worker before the other did
            raise StaleEpoch(
                f"{hello} is stale: {last_holder} has taken its place at this worker. "
                "Start the engine again if it should serve"
            )
        if session is None:
            return
        if not session.lease.is_waiting or session.hello.engine_id != hello.engine_id:
            raise WorkerHeld(
                f"this worker is held by {session.hello}; it serves one engine at a time: "
                f"stop that engine, or give {hello} another worker"
            )

    def _begin(self, hello: EngineHello, facts: WorkerFacts) -> Grant:
        if self._session is not None:
            self._session.end(ProtocolViolation(f"{hello} has started a new session"))
        self._last_holder = hello
        self._session = session = Session(
            hello,
            facts,
            self._thread,
            keep_s=self._keep_s,
            on_expired=self._expire,
            kv_transfers=self.kv_transfers,
        )
        self._status_publisher.change(held_by=str(hello))
        return session.attach(self._resume_ttl_s)

    def _expire(self, session: Session) -> None:
        log.warning("%s has not come back: its rows are freed", session.hello)
        self._end(session)

    def _end(self, session: Session, error: Exception | None = None) -> None:
        session.end(error)
        if session is self._session:
            self._session = None
            self._status_publisher.change(held_by="")


def _check_hello(hello: EngineHello, state: WorkerState, shared_config: Mapping[str, str]) -> None:
    """Raises HandshakeMismatch naming what differs, with both values."""
    assert state.facts is not None, "the worker is ready"
    if hello.max_steps_in_flight < 1:
        raise HandshakeMismatch(f"max_steps_in_flight: {hello.max_steps_in_flight} is below 1")
    check_same_values(
        {"engine": hello.shared_config, "worker": shared_config},
        advice="give both processes the same file, environment and flags",
    )
    check_kv_groups(
        state.facts.kv,
        hello.agreement,
        other=WORKER_PROTOCOL.client,
        transfers=state.facts.kv_endpoint is not None,
    )
    if not hello.fingerprint:
        return
    # Other weights are the engine's affair, which knows what it has begun with the ones before.
    comparison = compare(ModelIdentity(hello.fingerprint), state.facts.model.identity)
    if comparison.likeness < Likeness.FORM:
        raise HandshakeMismatch(
            f"the engine expects another model than the worker has: {comparison.difference}; "
            "start the engine again to serve the worker's model, or the worker with the checkpoint, config and "
            "version that the engine began with"
        )
