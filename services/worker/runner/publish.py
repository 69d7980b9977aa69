"""From what the rows of a step sampled to its result."""

from __future__ import annotations

import numpy as np

from services.worker.runner.prompt_logprobs import ScoredPrompts
from services.worker.runner.request_rows import StepRows
from services.worker.sampling.sampler import SampledTokens
from triptych.types.step import U32, StepResult, StepTimings


def publish(
    step_id: int,
    step: StepRows,
    slot_version: U32,
    sampled: SampledTokens,
    timings: StepTimings,
    scored: ScoredPrompts | None = None,
) -> StepResult:
    """
    Args:
        generation: of every slot, when the step was launched.
        scored: None: no row asked for log-probabilities of its prompt.
    """
    slots = step.sampling_slots
    failures = tuple(
        fault.at(int(slots[row]), int(slot_version[slots[row]])) for row, fault in sampled.failures
    )
    if scored is not None:
        failed = {failure.slot for failure in failures}  # one error for each row
        failures += tuple(failure for failure in scored.failures if failure.slot not in failed)
    return StepResult(
        step_id,
        sampled.token_ids.astype(np.uint32),
        logprobs=sampled.logprobs,
        prompt_logprobs=() if scored is None else scored.reported,
        row_errors=step.row_errors + failures,
        timings=timings,
    )
