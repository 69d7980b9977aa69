"""The sessions of frontends, each of which outlives its streams."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, replace

from triptych.errors import ProtocolViolation
from triptych.rpc.session.handshake import Agreement, SessionTerms
from triptych.rpc.session.lease import SessionLease
from triptych.types.submit import EngineWelcome
from triptych_services.enginecore.loop import EngineLoop, FrontendOutbox

log = logging.getLogger(__name__)

_NAME_BYTES = 16  # of randomness: a client that knows a session's name can read and end its requests


@dataclass(slots=True, eq=False)
class FrontendSession:
    """One frontend's requests in this engine, over all its streams."""

    number: int
    """Its number in the engine loop."""
    name: str
    """Its name on the wire."""
    frontend_id: str
    boot_id: str
    """Drawn at the frontend's start. Empty: not known."""
    outbox: FrontendOutbox
    lease: SessionLease
    takes_streams: bool = False
    """Whether the frontend takes up streams that began elsewhere, as it has said on the stream that there is."""
    messages_received: int = 0
    """Numbered messages handed to the loop."""
    lost_at: float = 0.0
    """When its last stream was lost, in seconds of the monotonic clock."""

    def is_of_earlier_process(self, frontend_id: str, boot_id: str) -> bool:
        """Return whether this is of the same frontend as of before it was started again."""
        return self.frontend_id == frontend_id and self.boot_id != boot_id


class FrontendSessions:
    """All sessions of one engine, by name. The servicer owns it."""

    def __init__(self, loop: EngineLoop, resume_ttl_s: float) -> None:
        """`resume_ttl_s`: for how long a session outlives its stream, in seconds."""
        self._loop = loop
        self._resume_ttl_s = resume_ttl_s
        self._name_to_session: dict[str, FrontendSession] = {}

    def __len__(self) -> int:
        """Return how many sessions there are."""
        return len(self._name_to_session)

    def join(
        self,
        frontend_id: str,
        boot_id: str,
        *,
        resume_session: str,
        last_batch_seen: int,
        agreement: Agreement,
    ) -> tuple[FrontendSession, SessionTerms]:
        """Give a new stream its session: the one that it names, if nothing of it is lost, else a new one."""
        resumed = self._resume(resume_session, last_batch_seen)
        session = resumed or self._open(frontend_id, boot_id)
        session.lease.attach()
        received, ttl_s = session.messages_received, self._resume_ttl_s
        return session, SessionTerms(session.name, resumed is not None, received, ttl_s, agreement)

    def lose(self, session: FrontendSession, stream: int) -> None:
        """Note that a stream of this session has ended without a goodbye."""
        if not session.lease.detach(stream):
            return  # another has taken over, or this is known, or the session has ended
        session.lost_at = time.monotonic()
        self._set_takes_streams(session, False)
        session.outbox.stop_reading(ProtocolViolation("the stream has ended without a goodbye"))
        if session.outbox.is_closed or session.outbox.is_overrun or not self._resume_ttl_s:
            self.end(session, "left without a goodbye", is_lost=True)
            return
        later = [other for other in self._name_to_session.values() if other.number > session.number]
        if any(session.is_of_earlier_process(other.frontend_id, other.boot_id) for other in later):
            self.end(session, "was started again", is_lost=True)
            return
        log.warning("frontend %s lost; it may come back within %g s", session.frontend_id, self._resume_ttl_s)

    def abandon(self, name: str) -> None:
        """End the session of this name, which its frontend has given up. It is no error if there is none."""
        session = self._name_to_session.get(name)
        if session is not None:
            self.end(session, "has given up its session")

    def end(self, session: FrontendSession, why: str, *, is_lost: bool = False) -> None:
        """End a session. Safe to repeat.

        Args:
            is_lost: The frontend may have died, so that its clients turn to another one: what is to be kept is. If not,
                what is left of its requests is aborted.
        """
        if self._name_to_session.pop(session.name, None) is not None:
            session.lease.end()
            self._set_takes_streams(session, False)
            if is_lost:
                self._loop.detach_session(session.number, time.monotonic() - session.lost_at)
            else:
                self._loop.close_session(session.number)
            log.info("frontend %s %s", session.frontend_id, why)

    def note_state(self, session: FrontendSession, *, takes_streams: bool) -> None:
        """Take in what a frontend says of itself; the welcome answers it."""
        self._set_takes_streams(session, takes_streams)
        session.outbox.notify(self._loop.welcome)

    def view_of(self, session: FrontendSession, welcome: EngineWelcome) -> EngineWelcome:
        """Return the engine's state as the frontend of a session sees it."""
        others = (other for other in self._name_to_session.values() if other is not session)
        return replace(
            welcome,
            num_other_frontends=sum(other.takes_streams for other in others),
            takes_streams=session.takes_streams,
        )

    def _set_takes_streams(self, session: FrontendSession, takes_streams: bool) -> None:
        """Note whether a frontend takes over streams of others, and report a change to the others."""
        if session.takes_streams != takes_streams:
            session.takes_streams = takes_streams
            for other in self._name_to_session.values():
                if other is not session:
                    other.outbox.notify(self._loop.welcome)

    def end_all(self) -> None:
        """End every session because the engine stops."""
        for session in tuple(self._name_to_session.values()):
            self.end(session, "is let go: the engine stops")

    def _open(self, frontend_id: str, boot_id: str) -> FrontendSession:
        """Begin a session.

        Sessions of the same frontend without a stream end if another process had them: the frontend was started again.
        """
        for other in tuple(self._name_to_session.values()):
            if other.lease.is_waiting and other.is_of_earlier_process(frontend_id, boot_id):
                self.end(other, "was started again", is_lost=True)
        number, outbox = self._loop.open_session()
        name = secrets.token_urlsafe(_NAME_BYTES)
        lease = SessionLease(keep_s=self._resume_ttl_s, on_expired=lambda: self._expire(name))
        session = FrontendSession(number, name, frontend_id, boot_id, outbox, lease)
        self._name_to_session[name] = session
        log.info("frontend %s connected", frontend_id)
        return session

    def _resume(self, name: str, last_batch_seen: int) -> FrontendSession | None:
        """Return the session of this name. None: it is not here, or has lost a later batch, and so has ended."""
        session = self._name_to_session.get(name)
        if session is None:
            return None
        if not session.outbox.can_resume_after(last_batch_seen):
            self.end(session, f"cannot go on behind batch {last_batch_seen}")
            return None
        session.outbox.confirm(last_batch_seen)
        session.outbox.notify(self._loop.welcome)
        log.info("frontend %s is back", session.frontend_id)
        return session

    def _expire(self, name: str) -> None:
        why = f"did not come back within {self._resume_ttl_s:g} s"
        self.end(self._name_to_session[name], why, is_lost=True)
