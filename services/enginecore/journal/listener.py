"""The events that the engine core reports while it runs, and the time that makes a run replayable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.types.journal import JournalEvent, What


class EngineListener(Protocol):
    """Hears of every call that can change an engine core, and of every step that it decides."""

    @property
    def state(self) -> str:
        """State of the recording, for `EngineStatus.journal`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that all recordings of this engine take."""

    @property
    def oldest_at_ms(self) -> int:
        """Unix time of the start of the earliest run that is recorded. 0: none is."""

    def on_event(self, event: JournalEvent) -> None:
        """Take in one event. A call is reported before it is carried out, and a step when it has been decided."""

    def close(self, at_s: float) -> None:
        """Take in that no event will follow."""


class CallLog:
    """The time of the engine core's current call, and the report of its calls to a listener.

    Time stays the same within a call, so the calls and their times are all that a replay needs.
    """

    def __init__(self, clock: Callable[[], float], listener: EngineListener | None) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            listener: Receives every call and decision; None: no listener, at no cost.
        """
        self.now_s = 0.0
        """Seconds at the start of the current call."""
        self.listener = listener
        self._clock = clock

    def now(self) -> float:
        return self.now_s

    def advance(self) -> None:
        """Read the time for the next call."""
        self.now_s = self._clock()

    def start(self, event: Callable[..., What], *fields: object) -> None:
        """Read the time for a call, and report the call.

        Args:
            event: Class of the event.
            fields: Fields of the event.
        """
        self.now_s = self._clock()
        if self.listener is not None:
            self.listener.on_event(JournalEvent(self.now_s, event(*fields)))

    def report(self, what: What) -> None:
        """Report an event of the current call."""
        if self.listener is not None:
            self.listener.on_event(JournalEvent(self.now_s, what))

    def close(self) -> None:
        """Report the end of the run."""
        if self.listener is not None:
            self.advance()
            self.listener.close(self.now_s)
