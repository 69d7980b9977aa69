"""The worker's state, as reported to callers: phase, progress, facts, and the engine that holds it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from triptych.types.facts import Phase, WorkerFacts


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The worker's state at one moment."""

    phase: str = Phase.STARTING
    progress: float = 0.0
    """Completed part of the phase, 0..1."""
    facts: WorkerFacts | None = None
    """Facts of the worker once it is ready, before that None."""
    held_by: str = ""
    """The engine that has a session here, in words. Empty: none has."""

    @property
    def is_ready(self) -> bool:
        return self.phase == Phase.READY


class StatusPublisher:
    """Holds the worker's current state. Owned by the event loop, on which `change` is called."""

    def __init__(self) -> None:
        self.state = WorkerState()
        self._has_settled = asyncio.Event()

    def change(self, **fields: object) -> None:
        """Replace some fields of the state."""
        self.state = replace(self.state, **fields)  # type: ignore[arg-type]
        if self.state.phase in (Phase.READY, Phase.ASLEEP, Phase.DRAINING):
            self._has_settled.set()
        else:
            self._has_settled.clear()

    async def wait_settled(self, timeout_s: float) -> None:
        """Return once the worker is not on its way to readiness, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_settled.wait()
