"""Steps before the first request, which set up everything that is set up on first use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.types.facts import KvKind, KvLayout, WorkerFacts
from triptych.types.sampling import MAX_LOGPROBS, SAMPLING_FIELDS, SamplingParams
from triptych.types.step import U32, NewRow, RowContent, StepPlan, empty_u32
from triptych_services.worker.runner.base import StepRunner

_NUM_TOKENS = 16  # enough to take the path of a prefill, too few to wait for

_ALL_KINDS = SamplingParams(
    **{name: spec.trial for name, spec in SAMPLING_FIELDS.items() if spec.trial is not None}
)
"""Sampling that uses every operation there is for it."""

_OTHER_FORMS = (
    SamplingParams(repetition_penalty=1.1, logprobs=0),
    SamplingParams(logprobs=MAX_LOGPROBS),
)
"""Sampling that launches other kernels for some operations: no row is restricted, and no or many alternatives are
listed."""


def warm_up(runner: StepRunner) -> None:
    """Run a small prefill and a few decodes, so that the first request does not wait for lazy set-up.

    They are ordinary steps of a session of their own, and leave keys and values in the first blocks. So they run before
    any engine uses these blocks.
    """
    facts = runner.facts
    num_prompt = _num_prompt(facts)
    if num_prompt < 1:
        return  # a context of two tokens has no decode to warm up
    tables = _tables(facts.kv, num_prompt)
    runner.reset()
    runner.execute(_first_step(1, num_prompt, tables, _ALL_KINDS))
    runner.execute(StepPlan(step_id=2, last_result_seen=1))
    for step_id, sampling in enumerate(_OTHER_FORMS, 3):
        runner.execute(_first_step(step_id, 1, tables, sampling))
    runner.reset()


def warm_up_plainly(runner: StepRunner) -> None:
    """Run a small prefill and a decode without options, in which the system backs the memory that they touch."""
    facts = runner.facts
    num_prompt = _num_prompt(facts)
    if num_prompt < 1:
        return
    tables = _tables(facts.kv, num_prompt)
    runner.reset()
    runner.execute(_first_step(1, num_prompt, tables, SamplingParams(temperature=0.0)))
    runner.execute(StepPlan(step_id=2, last_result_seen=1))
    runner.reset()


def _num_prompt(facts: WorkerFacts) -> int:
    """Return the length of the prompt, which leaves room for a decode and ends within a page of states."""
    intervals = [group.block_size for group in facts.kv.groups if group.kind is KvKind.STATE]
    return min([_NUM_TOKENS, facts.max_num_batched_tokens, facts.model.max_model_len - 2, *intervals])


def _tables(kv: KvLayout, num_prompt: int) -> list[U32]:
    """Return blocks for a prompt and a token behind it, by group. Groups share them, since nothing is asked of what
    these rows read."""
    return [np.arange(1, num_prompt // group.block_size + 2, dtype=np.uint32) for group in kv.groups]


def _first_step(step_id: int, num_tokens: int, tables: Sequence[U32], sampling: SamplingParams) -> StepPlan:
    """Return the plan of a step in which a request enters with its whole prompt, and the request before it leaves."""
    row = NewRow(
        slot=0,
        slot_version=step_id,
        content=RowContent(np.zeros(num_tokens, np.uint32), sampling),
        emitted_token_ids=empty_u32(),
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=tables[0],
        seed=0,
        group_block_ids=tuple(tables[1:]),
    )
    return StepPlan(
        step_id=step_id,
        last_result_seen=step_id - 1,
        removed_slots=np.zeros(int(step_id > 1), np.uint32),
        new_rows=(row,),
        chunk_slots=np.zeros(1, np.uint32),
        chunk_lengths=np.array([num_tokens], np.uint32),
    )
