"""What the engine loop needs of whatever computes steps; a gRPC one stands beside this, others in benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult


class WorkerLost(Exception):
    """The step stream has ended; nothing sent on it will be answered. The message says why."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker's welcome."""

    facts: WorkerFacts
    window: int
    """Steps in flight at most."""


class Executor(Protocol):
    """A step stream to one worker group. Owned by the engine loop."""

    async def connect(self, on_event: Callable[[], None]) -> Connected:
        """Open the stream, once; `on_event` is called whenever `receive` has news.

        Raises:
            TriptychError: refused or not reachable; says why. Try again later.
        """
        ...

    async def send(self, plan: StepPlan) -> None:
        """Hand one step over, without waiting for its result.

        Raises:
            WorkerLost: the stream has ended.
        """
        ...

    def receive(self) -> list[StepResult]:
        """The results that arrived since the last call, in order.

        Raises:
            WorkerLost: the stream has ended and all its results have been handed out.
        """
        ...

    async def close(self) -> None:
        """End the stream in order."""
        ...
