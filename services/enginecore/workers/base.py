"""What the engine loop needs of whatever computes steps; a gRPC one stands beside this, others in benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult


class WorkerLost(Exception):
    """The step stream has ended; the message says why."""

    def __init__(self, why: str, *, is_crash: bool = False, is_orderly: bool = False) -> None:
        """
        Args:
            is_crash: a step failed in the worker, so its rows are undefined and nobody can resume them.
            is_orderly: the worker drains; the steps that it did not take any more say nothing of anybody.
        """
        super().__init__(why)
        self.is_crash = is_crash
        self.is_orderly = is_orderly


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker's welcome."""

    facts: WorkerFacts
    max_steps_in_flight: int
    resume_ttl_s: float
    """For how long the session outlives a broken stream."""
    is_resumed: bool
    """Rows, blocks and steps in flight are as they were; else there are none."""


class Executor(Protocol):
    """A step stream to one worker group, and its session, which outlives the stream. Owned by the engine loop."""

    async def connect(self, on_event: Callable[[], None], *, resume: bool) -> Connected:
        """Open one stream, and resume the session if the worker has kept it.

        Args:
            on_event: Called whenever `receive` has something new.
            resume: Ask for the session of the stream before. False: forget it, and what was in flight in it.

        Raises:
            StaleEpoch: another engine has taken this one's place for good.
            TriptychError: refused or not reachable; says why. Try again later.
        """
        ...

    async def send(self, plan: StepPlan) -> None:
        """Hand one step over, without waiting for its result.

        Raises:
            WorkerLost: the stream has ended. If it is resumed, the step is sent then.
        """
        ...

    def receive(self) -> list[StepResult]:
        """The results that arrived since the last call, in order, each once.

        Raises:
            WorkerLost: the stream has ended and all its results have been handed out.
        """
        ...

    @property
    def session_name(self) -> str:
        """Name of the session, or of the last one. Empty: there was none."""
        ...

    async def call(self, method: str, *, timeout_s: float, **fields: object) -> Any:
        """Call a method of the worker beside the step stream, whether there is a session or not.

        Args:
            method: Of the worker's service.
            fields: Of its request.

        Returns:
            The response, with its fields as attributes.

        Raises:
            TriptychError: The worker cannot be reached, refuses, or did not answer in time; says why.
        """
        ...

    async def close(self) -> None:
        """Leave in order."""
        ...
