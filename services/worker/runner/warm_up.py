"""Steps before the first request, so that it does not pay for what is set up when it is first needed."""

from __future__ import annotations

import numpy as np

from services.worker.runner.base import StepRunner
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, StepPlan

_NUM_TOKENS = 16  # enough to take the path of a prefill, too few to wait for

_ALL_KINDS = SamplingParams(
    top_p=0.9,
    logprobs=1,
    repetition_penalty=1.1,
    min_tokens=2,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0, 1, 2),
)
"""Sampling that goes through every operation there is for it."""


def warm_up(runner: StepRunner) -> None:
    """Run a small prefill and a decode, so that the first request does not pay for lazy set-up.

    They are ordinary steps of a session of their own and leave keys and values in the first blocks: for a
    runner whose blocks nobody counts on yet.
    """
    facts = runner.facts
    num_prompt = min(_NUM_TOKENS, facts.max_num_batched_tokens, facts.model.max_model_len - 2)
    if num_prompt < 1:
        return  # a context of two tokens has no decode to warm up
    row = NewRow(
        slot=0,
        generation=0,
        token_ids=np.zeros(num_prompt, np.uint32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=np.arange(1, num_prompt // facts.kv.block_size + 2, dtype=np.uint32),
        sampling=_ALL_KINDS,
        seed=0,
    )
    runner.reset()
    runner.execute(
        StepPlan(
            step_id=1,
            last_result_seen=0,
            new_rows=(row,),
            chunk_slots=np.zeros(1, np.uint32),
            chunk_lengths=np.array([num_prompt], np.uint32),
        )
    )
    runner.execute(StepPlan(step_id=2, last_result_seen=1))
    runner.reset()
