"""The interface between a worker's service and the runner that computes its steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from triptych.types.adapters import AdapterFacts
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.kv_transfer.base import BlockStore

PhaseChange = Callable[[str, float], None]
"""Called with (phase, progress within it, 0..1) while a runner starts or wakes."""


def do_nothing() -> None:
    """Do nothing."""


class PendingStep(Protocol):
    """A step that has been launched. Used on its runner's thread only."""

    @property
    def poll_s(self) -> float:
        """Seconds after which `is_done` should be asked again while there is nothing else to do."""
        ...

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Wait for the step and for those launched before it, and return its result.

        Raises:
            RuntimeError: The device failed; rows are undefined until `Runner.reset()`.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CompletedStep:
    """A `PendingStep` that was complete when it had been launched."""

    result: StepResult

    @property
    def poll_s(self) -> float:
        return 0.0

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class StepRunner(Protocol):
    """Computes steps, strictly in order, on one thread. Holds the rows of one session at a time."""

    @property
    def facts(self) -> WorkerFacts:
        """The facts that the handshake sends to the engine; constant after construction."""
        ...

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        """Launch one step. An asynchronous device may still compute earlier ones.

        The failure of one request is data in the result. After an exception rows are undefined until `reset()`.

        Args:
            on_prepared: Called when the step's inputs are gathered, before they are computed on, so that other threads
                of Python disturb the preparation of no step. Not called for a step that fails before that, or computes
                nothing.

        Raises:
            ProtocolViolation: The plan contradicts the plans before it.
        """
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Set up what a plan is the first to need, which may take longer than a step may. Called before `launch`."""
        return

    def execute(self, plan: StepPlan) -> StepResult:
        """Prepare and launch one step, and wait for it."""
        self.prepare(plan)
        return self.launch(plan).wait()

    def reset(self) -> None:
        """Forget every row and expect step 1 of a new session.

        Waits for all steps in flight and drops their results.
        """
        ...


class Runner(StepRunner, Protocol):
    """A runner that can give its memory back for a while."""

    def block_store(self) -> BlockStore:
        """Return the KV blocks as bytes, for transfers between workers; others after each `wake`.

        Raises:
            FeatureDisabled: Its device's blocks cannot be transferred.
        """
        ...

    def sleep(self, level: SleepLevel) -> int:
        """Forget every row, and free the memory of keys and values, and of weights as `level` says.

        Until `wake` only `facts` may be used.

        Returns:
            The number of bytes freed on the device.

        Raises:
            MemoryShort: The host has no memory for the weights. Rows are forgotten, and nothing else has changed.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory again, with the same facts, and expect step 1.

        After an error the runner still sleeps and can be woken again.

        Raises:
            MemoryShort: The device has not enough free memory now.
            ModelError: The checkpoint is missing, or is that of another model.
        """
        ...


class AdapterHolder(Protocol):
    """LoRA adapters in the host's memory, from which the runner's thread takes those that rows name.

    `load` and `unload` are called one at a time, on any thread, and `list` on any beside them. A load is not on the
    runner's thread.
    """

    def load(self, name: str, source: str, directory: Path) -> AdapterFacts:
        """Read, check and pack an adapter, while steps go on. One with a digest that is loaded is not packed again.

        Args:
            name: Name that clients use, for the facts.
            source: Directory as the operator wrote it, for the facts.
            directory: Directory that it is read from.

        Raises:
            ModelError: The files are none of an adapter that this model can have; names the file and the reason.
            MemoryShort: All adapters together would take more than they may.
        """
        ...

    def unload(self, digest: str) -> None:
        """Free an adapter that no row uses. No effect if it is not loaded."""
        ...

    def list(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that are loaded."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """A runner with `WorkerFacts.max_adapters` > 0."""

    @property
    def adapters(self) -> AdapterHolder:
        """The adapters that rows may name."""
        ...
