"""The dialing end of a session: it decides when to dial again, and when to give the session up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from triptych.errors import EngineUnavailable

FIRST_REDIAL_S = 0.05
MAX_REDIAL_S = 0.25
"""A server that is started again is noticed within this. A dial that is refused at once costs next to nothing."""
_TIMER_S = 1e-6
MAX_FUTILE_STREAMS = 3
"""A session is given up when one more stream than these breaks with no progress in between."""


class Welcomed(Protocol):
    """The part of a server's welcome that concerns the session."""

    @property
    def is_resumed(self) -> bool:
        """Whether the session that was asked for goes on."""
        ...

    @property
    def resume_ttl_s(self) -> float:
        """How long the session outlives a broken stream, in seconds."""
        ...


WelcomedT = TypeVar("WelcomedT", bound=Welcomed)


class Dialer(Generic[WelcomedT]):
    """Dials one server whenever its owner has no stream, and counts the attempts that are left to a session.

        dial ──► welcomed: a new session, or the old one goes on
          ▲          │ the stream breaks
          └── note_broken ──► given up: refused, no progress over 4 streams, or not resumed within its time to live

    Owned by one task, which alone dials and has at most one stream.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[WelcomedT]],
        *,
        on_failed: Callable[[Exception], None],
        on_given_up: Callable[[str], None],
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """
        Args:
            connect: Opens a stream and shakes hands. It asks for the old session as long as `has_session` says so.
            on_failed: Called with what went wrong each time that `connect` has failed.
            on_given_up: Called once when a session is over, with the reason.
            fatal: Errors of `connect` that dialing again cannot mend; `dial` raises them.
        """
        self._connect = connect
        self._on_failed = on_failed
        self._on_given_up = on_given_up
        self._fatal = fatal
        self.has_session = False
        """There is a session, with a stream or to be resumed."""
        self._resume_ttl_s = 0.0
        self._num_futile = 0
        """Streams that broke one after the other with no progress in between."""
        self._deadline: float | None = None
        """When the session is given up, on the event loop's clock. None: it has a stream, or there is no session."""
        self._why_broken = ""

    async def dial(self) -> WelcomedT:
        """Dial until the server welcomes this client; after failures wait for 50 ms, doubling to 250 ms.

        A failure that itself took as long as the longest wait, such as a server's that holds the caller until it is
        ready, is followed by the shortest.

        Raises:
            Exception: One of the fatal errors.
        """
        loop, delay_s = asyncio.get_running_loop(), FIRST_REDIAL_S
        while True:
            dialed_at = loop.time()
            try:
                async with asyncio.timeout_at(self._deadline):
                    welcomed = await self._connect()
            except self._fatal:
                raise
            except TimeoutError:
                self._expire()
                self._on_failed(EngineUnavailable(f"no answer within {self._resume_ttl_s:g} s"))
            except Exception as error:
                self._on_failed(error)
            else:
                self._note_welcome(welcomed)
                return welcomed
            if loop.time() - dialed_at >= MAX_REDIAL_S:
                delay_s = FIRST_REDIAL_S
            await asyncio.sleep(self._until_deadline(delay_s))
            self._expire()
            delay_s = min(2 * delay_s, MAX_REDIAL_S)

    def note_progress(self) -> None:
        """Note progress: a message of this session has arrived."""
        self._num_futile = 0

    def note_broken(self, why: str, *, is_futile: bool = True, is_over: bool = False) -> None:
        """Note that a stream, or an attempt to resume one, has failed.

        Args:
            is_futile: The same will probably break the next stream, unless something gets through in between.
            is_over: The session cannot go on.
        """
        if not self.has_session:
            return
        self._num_futile += is_futile
        if is_over or self._num_futile > MAX_FUTILE_STREAMS or not self._resume_ttl_s:
            self.give_up(why)
        elif self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._resume_ttl_s
            self._why_broken = why

    def give_up(self, why: str) -> None:
        """End the session on this side. The next stream begins another."""
        if self.has_session:
            self.has_session, self._num_futile, self._deadline = False, 0, None
            self._on_given_up(why)

    def _note_welcome(self, welcomed: WelcomedT) -> None:
        if not welcomed.is_resumed:
            self.give_up("it has not kept the session: it was started again, or was away for too long")
        self.has_session, self._deadline = True, None
        self._resume_ttl_s = welcomed.resume_ttl_s

    def _until_deadline(self, delay_s: float) -> float:
        if self._deadline is None:
            return delay_s
        return max(0.0, min(delay_s, self._deadline - asyncio.get_running_loop().time()))

    def _expire(self) -> None:
        """Give the session up if its time is over."""
        # A timer may fire that much early: waiting for what is left would take no time, for ever.
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline - _TIMER_S:
            self.give_up(f"{self._why_broken}; not back within {self._resume_ttl_s:g} s")
