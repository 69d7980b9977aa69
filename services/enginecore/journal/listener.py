"""The events that the engine core reports while it runs, and the clock that makes a run replayable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.types.journal import JournalEvent


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


class CallClock:
    """A clock that stands still within a call of the engine core.

    So the calls and their times are all that a replay needs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = 0.0
        """Seconds at the start of the current call."""
        self._clock = clock

    def __call__(self) -> float:
        return self.now_s

    def advance(self) -> None:
        """Read the time for the next call."""
        self.now_s = self._clock()
