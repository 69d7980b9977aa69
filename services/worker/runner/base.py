"""What a worker's door needs of whatever computes steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan, StepResult

MAX_STEPS_IN_FLIGHT = (
    4  # steps in flight that a runner accepts: past that a stop comes back too late to save work
)


class PendingStep(Protocol):
    """A step that has been launched; belongs to its runner's thread."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """The step's result, once its device has it; steps launched before it are waited for as well.

        Raises:
            RuntimeError: the device failed; rows are undefined until `Runner.reset()`.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CompletedStep:
    """A `PendingStep` whose result is there: of a runner that computes on the thread that calls it."""

    result: StepResult

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class StepRunner(Protocol):
    """Computes steps, strictly in order, on one thread; holds the rows of one session at a time."""

    @property
    def facts(self) -> WorkerFacts:
        """What the handshake tells the engine; constant after construction."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin one step; on an asynchronous device it may be launched before the results of earlier ones are there.

        One request's failure is data in the result. After an exception rows are undefined until `reset()`.

        Raises:
            ProtocolViolation: the plan contradicts the plans before it.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step: `launch`, then `wait`."""
        ...

    def reset(self) -> None:
        """Forget every row and expect step 1: a new session begins. Steps that have not been waited for are
        waited for here, and nobody hears of them."""
        ...


class Runner(StepRunner, Protocol):
    """One whose memory can be given back for a while."""

    def sleep(self, level: SleepLevel) -> int:
        """Forget every row and give back the memory of keys and values, and of weights as `level` says; until `wake`
        nothing else may be called but `facts`. Returns the bytes that the device has got back.

        Raises:
            MemoryShort: the weights have no room where they shall wait; rows are forgotten, nothing else has changed.
        """
        ...

    def wake(self) -> None:
        """Take memory again, with the facts that were told, and expect step 1. After an error it sleeps on and can be
        woken again.

        Raises:
            MemoryShort: the device has no room now.
            ModelError: the checkpoint is not there any more, or is one of another model.
        """
        ...
