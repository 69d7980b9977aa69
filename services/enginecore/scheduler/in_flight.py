"""The steps that the worker has been sent and has not answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.enginecore.scheduler.running_rows import Slots
from triptych.errors import ProtocolViolation
from triptych.types.step import U32, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """What the engine must remember of a plan to read its result."""

    step_id: int
    num_tokens: int
    planned_at: float
    """In seconds, on the scheduler's clock."""
    sampling_slots: Slots
    """[s] ascending: the slots that the result's tokens belong to."""
    generations: U32
    """[s] of the rows that were in them: a token for another one is nobody's."""
    newly_cached_blocks: list[int]
    """Blocks that others may hit since this plan, on the promise that it computes what stands in them."""


class StepsInFlight:
    """Oldest first; results come in the order of plans."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._last_step_id = 0
        self._last_result_seen = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def next_step_id(self) -> int:
        return self._last_step_id + 1

    @property
    def last_result_seen(self) -> int:
        return self._last_result_seen

    def push(self, step: InFlightStep) -> None:
        assert step.step_id == self.next_step_id, "step ids are dense"
        self._steps.append(step)
        self._last_step_id = step.step_id

    def pop(self, result: StepResult) -> InFlightStep:
        """The step that `result` answers.

        Raises:
            ProtocolViolation: it is not the oldest one's, or has another number of tokens than planned.
        """
        if not self._steps:
            raise ProtocolViolation(f"result of step {result.step_id}, but no step is in flight")
        step = self._steps[0]
        if result.step_id != step.step_id:
            raise ProtocolViolation(f"result of step {result.step_id}, but step {step.step_id} is due")
        planned, got = len(step.sampling_slots), len(result.token_ids)
        if got != planned:
            raise ProtocolViolation(f"result of step {step.step_id} has {got} tokens, {planned} were planned")
        self._last_result_seen = step.step_id
        return self._steps.popleft()

    def forget(self) -> None:
        """No result will come; the next step starts a new count."""
        self._steps.clear()
        self._last_step_id = self._last_result_seen = 0
