"""An accelerator for each stage of a model: they compute different steps at the same time, one after the other each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from triptych.config.step_times import StepTimeModel, StepWork
from triptych.types.step import StepResult

I64 = NDArray[np.int64]


class SimulatedStages:
    """Knows when each stage is done with each step. Owned by the runner; nothing waits here.

    A step takes its time in equal parts. Its first stage begins when the tokens that its rows need have left the last
    one, in the order of the steps.
    """

    def __init__(
        self,
        step_time: StepTimeModel,
        *,
        num_stages: int,
        max_num_seqs: int,
        clock: Callable[[], int],
        sleep: Callable[[float], None],
    ) -> None:
        """
        Args:
            clock, sleep: As of `SimulatedDevice`.
        """
        self._step_time = step_time
        self._clock = clock
        self._sleep = sleep
        self._free_at_ns = [0] * num_stages
        """When each stage is done with all steps so far."""
        self._token_at_ns: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] when the last token of each slot leaves the last stage."""

    def launch(
        self, result: StepResult, work: StepWork, *, decoding_slots: I64, sampling_slots: I64, arrived_ns: int
    ) -> StepInStages:
        """Return a step that arrives now.

        Args:
            result: What comes of it.
            decoding_slots: [num_decode_rows] slots that need the token that they have sampled last.
            sampling_slots: [num_sampling] slots that get a token.
            arrived_ns: Time at which its plan came.
        """
        stage_ns = self._step_time.step_ns(work) // len(self._free_at_ns)
        at_ns = int(self._token_at_ns[decoding_slots].max(initial=arrived_ns))
        gap_ns = 0
        for stage, free_at_ns in enumerate(self._free_at_ns):
            gap_ns = max(at_ns - free_at_ns, 0) if free_at_ns else 0
            self._free_at_ns[stage] = at_ns = max(at_ns, free_at_ns) + stage_ns
        self._token_at_ns[sampling_slots] = at_ns
        timings = replace(result.timings, forward_ns=stage_ns, gap_ns=gap_ns)
        return StepInStages(replace(result, timings=timings), at_ns, self._clock, self._sleep)

    def forget_rows(self) -> None:
        """Let the rows of a new session need no tokens of the one before."""
        self._token_at_ns[:] = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepInStages:
    """A `PendingStep`. `forward_ns` is its time in one stage, `gap_ns` the time for which the last one stood idle."""

    result: StepResult
    done_at_ns: int
    clock: Callable[[], int]
    sleep: Callable[[float], None]

    @property
    def poll_s(self) -> float:
        return max(self.done_at_ns - self.clock(), 0) / 1e9

    def is_done(self) -> bool:
        return self.clock() >= self.done_at_ns

    def wait(self) -> StepResult:
        if (rest_ns := self.done_at_ns - self.clock()) > 0:
            self.sleep(rest_ns / 1e9)
        return self.result
