"""A worker's way to readiness, for everyone who asks: phase, progress, facts, holder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from triptych.types.facts import Phase, WorkerFacts


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One moment."""

    phase: str = Phase.STARTING
    progress: float = 0.0
    """Of the phase, 0..1."""
    facts: WorkerFacts | None = None
    """Once ready."""
    held_by: str = ""
    """The engine whose step stream is open."""

    @property
    def is_ready(self) -> bool:
        return self.phase == Phase.READY


class StatusPublisher:
    """The current state; owned by the event loop, which alone calls `change`."""

    def __init__(self) -> None:
        self.state = WorkerState()
        self._changed = asyncio.Event()

    def change(self, **fields: object) -> None:
        self.state = replace(self.state, **fields)  # type: ignore[arg-type]
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[WorkerState]:
        """The state now, then after every change; a slow reader skips states, never the last one."""
        while True:
            changed, state = self._changed, self.state
            yield state
            if state is self.state:
                await changed.wait()
