"""Reading the probabilities that a runner gives to tokens chosen by somebody else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.worker.tiny import new_row, step_plan
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych_services.worker.runner.base import Runner


def teacher_forced_logprobs(
    runner: Runner, sequences: Sequence[Sequence[int]], num_prompts: Sequence[int]
) -> list[np.ndarray]:
    """Log-probability of every token from `num_prompts[i]` on, given all before it in `sequences[i]`.

    Each prompt is prefilled within the step's budget; then all sequences advance together, one token per
    step, each time as a new row that allows the right next token alone (log-probabilities are taken before
    that). Takes the runner's whole session, one slot per sequence and blocks for all of them.
    """
    facts = runner.facts
    block_tables, next_block = [], 1
    for tokens in sequences:
        num_blocks = -(-len(tokens) // facts.kv.block_size)
        block_tables.append(range(next_block, next_block + num_blocks))
        next_block += num_blocks

    def row_up_to(slot: int, num_known: int, num_computed: int) -> NewRow:
        forced = SamplingParams(
            temperature=0.0, logprobs=0, allowed_token_ids=(int(sequences[slot][num_known]),)
        )
        return new_row(
            slot,
            sequences[slot][:num_known],
            block_tables[slot],
            computed=num_computed,
            num_prompt=1,
            sampling=forced,
        )

    runner.reset()
    step_id = 0
    found: list[list[float]] = [[] for _ in sequences]
    for slot, num_prompt in enumerate(num_prompts):
        entering, earlier = [row_up_to(slot, num_prompt, 0)], list(range(slot))
        for start in range(0, num_prompt, facts.max_num_batched_tokens):
            step_id += 1
            length = min(facts.max_num_batched_tokens, num_prompt - start)
            result = runner.execute(step_plan(step_id, new=entering, chunks={slot: length}, skipped=earlier))
            entering = []
        found[slot].append(float(result.logprobs.logprobs[0]))
    live = list(range(len(sequences)))
    for offset in range(1, max(len(tokens) for tokens in sequences)):
        going_on = [slot for slot in live if num_prompts[slot] + offset < len(sequences[slot])]
        if not going_on:
            break
        step_id += 1
        rows = [
            row_up_to(slot, num_prompts[slot] + offset, num_prompts[slot] + offset - 1) for slot in going_on
        ]
        result = runner.execute(step_plan(step_id, removed=live, new=rows))
        live = going_on
        for slot, logprob in zip(going_on, result.logprobs.logprobs, strict=True):
            found[slot].append(float(logprob))
    runner.reset()
    return [np.array(logprobs) for logprobs in found]
