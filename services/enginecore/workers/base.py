"""The interface between the engine loop and what computes its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.types.facts import WorkerFacts
from triptych.types.kv_transfer import KvProgress
from triptych.types.step import StepPlan, StepResult


class WorkerLost(Exception):
    """The end of a step stream. The message says why."""

    def __init__(self, why: str, *, is_crash: bool = False, is_orderly: bool = False) -> None:
        """
        Args:
            is_crash: A step has failed in the worker. Its rows are undefined and cannot be resumed.
            is_orderly: The worker drains. The steps that it has not taken are no evidence against any request.
        """
        super().__init__(why)
        self.is_crash = is_crash
        self.is_orderly = is_orderly


class WorkerGone(WorkerLost):
    """The end of a session that could have been resumed: its worker is gone, and another one of the pool is next."""

    def __init__(self, why: str, *, has_died: bool) -> None:
        """
        Args:
            has_died: Its process has ended. False: it serves another engine.
        """
        super().__init__(why)
        self.has_died = has_died


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker's welcome."""

    facts: WorkerFacts
    max_steps_in_flight: int
    resume_ttl_s: float
    """For how long the session outlives a broken stream, in seconds."""
    is_resumed: bool
    """Rows, blocks and steps in flight are as they were. False: there are none."""


class Executor(Protocol):
    """A step stream to one worker group, and its session, which outlives the stream. Owned by the engine loop."""

    async def connect(self, on_event: Callable[[], None], *, resume: bool) -> Connected:
        """Open one stream, and resume the session if the worker has kept it.

        Args:
            on_event: Called whenever `receive` has something new.
            resume: Ask for the session of the stream before. False: forget it, and what was in flight in it.

        Raises:
            StaleEpoch: Another engine has taken this one's place for good.
            WorkerGone: The session cannot be resumed, and another worker may be free. Dial without it.
            TriptychError: The worker refuses or cannot be reached; says why. Try again later.
        """
        ...

    @property
    def address(self) -> str:
        """Address of the worker that is or was dialed last."""
        ...

    async def send(self, plan: StepPlan) -> None:
        """Send one step, without waiting for its result or for the transport.

        Steps that the transport holds up are bounded by the steps in flight: no more are planned without a result.

        Raises:
            WorkerLost: The stream has ended. If it is resumed, the step is sent then. An end that comes later is
                raised by `receive`.
        """
        ...

    def receive(self) -> list[StepResult]:
        """Return the results that arrived since the last call, in order, each once.

        Raises:
            WorkerLost: The stream has ended and all its results have been returned.
        """
        ...

    def take_kv_progress(self) -> KvProgress | None:
        """Return how far the worker's transfers of KV blocks have come, if it has reported since the last call."""
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
        """Say goodbye and close the stream."""
        ...
