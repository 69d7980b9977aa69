"""For how long a server keeps a session that lost its stream, and which of its streams counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SessionLease:
    """A session's claim to its place at the server. Owned by the session, on one event loop.

        attach ──► held by a stream ── detach ──► waiting ── attach ──► held …
                        │                            └── keep_s is over ──► on_expired()
                        └────────── end ──────────────┘

    Streams are numbered from 1. Only the latest counts: what an earlier one still brings is not taken.
    """

    def __init__(self, *, keep_s: float, on_expired: Callable[[], None]) -> None:
        """
        Args:
            keep_s: For how long the session outlives a stream, in seconds.
            on_expired: Called when it has been without a stream for `keep_s`.
        """
        self.stream = 0
        """Number of the stream that counts. 0: there is none."""
        self._num_streams = 0
        self._keep_s = keep_s
        self._on_expired = on_expired
        self._expiry: asyncio.TimerHandle | None = None
        """Runs while the session waits for a stream."""

    @property
    def is_waiting(self) -> bool:
        """Whether the session has lost its stream and waits for the next one."""
        return self._expiry is not None

    def attach(self) -> int:
        """Give the session to a new stream and return the stream's number."""
        self._stop_expiry()
        self._num_streams += 1
        self.stream = self._num_streams
        return self.stream

    def detach(self, stream: int) -> bool:
        """Note that a stream has ended. Return whether the session waits now; False if another stream has it."""
        if stream != self.stream:
            return False
        self.stream = 0
        self._expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire)
        return True

    def end(self) -> None:
        """End the session. No stream counts any more."""
        self.stream = 0
        self._stop_expiry()

    def _expire(self) -> None:
        self._expiry = None
        self._on_expired()

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
