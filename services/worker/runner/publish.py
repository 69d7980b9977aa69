"""From what the rows of a step sampled to its result."""

from __future__ import annotations

import numpy as np

from services.worker.runner.request_rows import StepRows
from services.worker.sampling.sampler import SampledTokens
from triptych.types.step import U32, RowError, StepResult, StepTimings


def publish(
    step_id: int, step: StepRows, generation: U32, sampled: SampledTokens, timings: StepTimings
) -> StepResult:
    """`generation`: of every slot, when the step was launched."""
    slots = step.sampling_slots
    failures = tuple(
        RowError(int(slots[row]), int(generation[slots[row]]), message) for row, message in sampled.failures
    )
    return StepResult(
        step_id,
        sampled.token_ids.astype(np.uint32),
        logprobs=sampled.logprobs,
        row_errors=step.row_errors + failures,
        timings=timings,
    )
