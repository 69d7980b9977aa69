"""The result of a step, from what its rows sampled and scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from triptych.types.step import U32, RowKey, StepResult, StepTimings, empty_u32
from triptych_services.worker.runner.drafting.base import GuessReport
from triptych_services.worker.runner.pooling import PooledVectors
from triptych_services.worker.runner.prompt_targets import ScoredPrompts
from triptych_services.worker.runner.request_rows import StepRows
from triptych_services.worker.sampling.sampled import SampledTokens


def publish(
    step_id: int,
    step: StepRows,
    slot_version: U32,
    sampled: SampledTokens,
    timings: StepTimings,
    scored: ScoredPrompts | None = None,
    pooled: PooledVectors | None = None,
    guesses: GuessReport | None = None,
) -> StepResult:
    """Return the result of a step.

    Args:
        slot_version: [max_num_seqs] when the step was launched.
        scored: None if no row asked for log-probabilities of its prompt.
        pooled: None if no row is pooled.
        guesses: What is said of guesses; None: nothing guesses.
    """
    token_ids, token_counts, logprobs = sampled.token_ids.astype(np.uint32), empty_u32(), sampled.logprobs
    if sampled.token_counts is not None:
        token_counts = sampled.token_counts.astype(np.uint32)
    row_errors = step.row_errors
    if pooled is not None:
        row_errors = {**pooled.failures, **row_errors}
    if sampled.failures or scored is not None:
        slots = step.sampling_slots
        row_errors = {  # a row that fails in several ways is reported with the first of them
            **({} if scored is None else scored.failures),
            **{
                RowKey(int(slots[row]), int(slot_version[slots[row]])): error
                for row, error in sampled.failures
            },
            **row_errors,
        }
    if sampled.failures:
        failed = [row for row, _ in sampled.failures]
        counts = token_counts if token_counts.size else np.ones(len(token_ids), np.uint32)
        is_kept = np.ones(len(token_ids), np.bool_)
        is_kept[np.cumsum(counts)[failed] - 1] = False  # such a row has one token
        token_ids = token_ids[is_kept]
        token_counts = counts.copy()
        token_counts[failed] = 0
        if logprobs is not None:  # their rows count the kept tokens from now on
            places = np.cumsum(is_kept) - 1
            logprobs = replace(logprobs, rows=places[logprobs.rows].astype(np.uint32))
    return StepResult(
        step_id,
        token_ids,
        token_counts,
        logprobs=logprobs,
        prompt_logprobs={} if scored is None else scored.reported,
        row_errors=row_errors,
        vectors={} if pooled is None else pooled.reported,
        timings=timings,
        guess_counts=empty_u32() if guesses is None else guesses.next_counts,
        guesses=() if guesses is None else guesses.verified,
    )
