"""What a worker's door needs of whatever computes steps."""

from __future__ import annotations

from typing import Protocol

from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult

MAX_WINDOW = 4  # steps in flight that a runner accepts: past that a stop comes back too late to save work


class Runner(Protocol):
    """Computes steps, strictly in order, on one thread; holds the rows of one session at a time."""

    @property
    def facts(self) -> WorkerFacts:
        """What the handshake tells the engine; constant after construction."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step.

        One request's failure is data in the result. After an exception rows are undefined until `reset()`.

        Raises:
            ProtocolViolation: the plan contradicts the plans before it.
        """
        ...

    def reset(self) -> None:
        """Forget every row and expect step 1: a new session begins."""
        ...
