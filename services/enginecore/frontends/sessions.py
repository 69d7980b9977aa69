"""What outlives a frontend's stream: its session, which a later stream may resume within a time to live."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field

from services.enginecore.frontends.outbox import Outbox
from services.enginecore.loop import EngineLoop

log = logging.getLogger(__name__)

_NAME_BYTES = 16  # of randomness: who knows a session's name can read and end its requests


@dataclass(slots=True, eq=False)
class FrontendSession:
    """One frontend's requests in this engine, over all its streams."""

    number: int
    """In the engine loop."""
    name: str
    """On the wire."""
    frontend_id: str
    boot_id: str
    """Drawn at the frontend's start; empty: not known."""
    outbox: Outbox
    messages_received: int = 0
    """Submits and aborts handed to the loop."""
    stream: int = 1
    """Which of its streams counts, from 1: the latest, until it is lost. No other has anything to say."""
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)
    """Runs while there is no stream."""

    def is_of_earlier_process(self, frontend_id: str, boot_id: str) -> bool:
        """Return whether this is of the same frontend as of before it was started again."""
        return self.frontend_id == frontend_id and self.boot_id != boot_id


class FrontendSessions:
    """Owned by the door."""

    def __init__(self, loop: EngineLoop, resume_ttl_s: float) -> None:
        self._loop = loop
        self.resume_ttl_s = resume_ttl_s
        self._by_name: dict[str, FrontendSession] = {}

    def open(self, frontend_id: str, boot_id: str) -> FrontendSession:
        """Begin a session with a first stream.

        Sessions of the same name whose stream is lost end if another process had them: the frontend was started again.
        """
        for other in tuple(self._by_name.values()):
            if other.expiry is not None and other.is_of_earlier_process(frontend_id, boot_id):
                self.end(other, "was started again")
        number, outbox = self._loop.open_session()
        session = FrontendSession(number, secrets.token_urlsafe(_NAME_BYTES), frontend_id, boot_id, outbox)
        self._by_name[session.name] = session
        log.info("frontend %s connected", frontend_id)
        return session

    def resume(self, name: str, last_batch_seen: int) -> FrontendSession | None:
        """The session of this name with one more stream, which the earlier one makes way for.

        None if it is not here any more, or if a batch behind `last_batch_seen` is not: then it has ended.
        """
        session = self._by_name.get(name)
        if session is None:
            return None
        if not session.outbox.can_resume_after(last_batch_seen):
            self.end(session, f"cannot go on behind batch {last_batch_seen}")
            return None
        session.outbox.acknowledge(last_batch_seen)
        self._stop_expiry(session)
        session.stream += 1
        session.outbox.put(self._loop.welcome)
        log.info("frontend %s is back", session.frontend_id)
        return session

    def lose(self, session: FrontendSession, stream: int) -> None:
        """A stream of this session has ended without a goodbye."""
        if session.stream != stream or session.name not in self._by_name:
            return  # another has taken over, or this is known, or the session has ended
        session.stream += 1
        session.outbox.stop_reading()
        if session.outbox.is_closed or session.outbox.is_overrun or not self.resume_ttl_s:
            self.end(session, "left without a goodbye")
            return
        later = [other for other in self._by_name.values() if other.number > session.number]
        if any(session.is_of_earlier_process(other.frontend_id, other.boot_id) for other in later):
            self.end(session, "was started again")
            return
        log.warning("frontend %s lost; it may come back within %g s", session.frontend_id, self.resume_ttl_s)
        why = f"did not come back within {self.resume_ttl_s:g} s"
        session.expiry = asyncio.get_running_loop().call_later(self.resume_ttl_s, self.end, session, why)

    def abandon(self, name: str) -> None:
        """End the session of this name, which its frontend has given up; one that is not here is no error."""
        session = self._by_name.get(name)
        if session is not None:
            self.end(session, "has given up its session")

    def end(self, session: FrontendSession, why: str) -> None:
        """Abort what is left of its requests. Safe to repeat."""
        if self._by_name.pop(session.name, None) is not None:
            self._stop_expiry(session)
            self._loop.close_session(session.number)
            log.info("frontend %s %s", session.frontend_id, why)

    def end_all(self) -> None:
        for session in tuple(self._by_name.values()):
            self.end(session, "is let go: the engine stops")

    @staticmethod
    def _stop_expiry(session: FrontendSession) -> None:
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
