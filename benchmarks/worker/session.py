"""A runner that is called in process, without a scheduler: rows of random tokens, all of them live in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult, empty_u32
from triptych_services.worker.runner.base import PendingStep, Runner

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, speculation=False)


class RunnerSession:
    """Numbers the steps of a runner's session."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._step_id = 0

    def restart(self) -> None:
        """Begin a new session without rows; the runner's keys and values stay."""
        self._runner.reset()
        self._step_id = 0

    def launch(self, **columns: Any) -> PendingStep:
        """Launch a step; without columns every row decodes one token."""
        self._step_id += 1
        plan = StepPlan(step_id=self._step_id, last_result_seen=self._step_id - 1, **columns)
        self._runner.prepare(plan)
        return self._runner.launch(plan)

    def prefill(self, rows: Sequence[NewRow]) -> None:
        """Compute the prompts of new rows of one length, whole ones, as many in a step as its tokens allow."""
        prompt_len = len(rows[0].content.prompt_token_ids)
        per_step = max(self._runner.facts.max_num_batched_tokens // prompt_len, 1)
        for first in range(0, len(rows), per_step):
            entering = rows[first : first + per_step]
            step = self.launch(
                new_rows=tuple(entering),
                chunk_slots=np.array([row.slot for row in entering], np.uint32),
                chunk_lengths=np.full(len(entering), prompt_len, np.uint32),
                skipped_slots=np.arange(first, dtype=np.uint32),  # those before compute nothing
            )
            checked(step.wait())

    def row(self, slot: int, prompt_len: int, *, num_blocks: int, seed: int = 0) -> NewRow:
        """Return a row with a random prompt and `num_blocks` blocks of its own."""
        rng = np.random.default_rng((seed, slot))
        vocab_size = self._runner.facts.model.vocab_size
        first_block = 1 + slot * num_blocks
        return NewRow(
            slot=slot,
            slot_version=0,
            content=RowContent(rng.integers(0, vocab_size, prompt_len, dtype=np.uint32), _GREEDY),
            emitted_token_ids=empty_u32(),
            num_computed_tokens=0,
            num_cached_tokens=0,
            block_ids=np.arange(first_block, first_block + num_blocks, dtype=np.uint32),
            seed=0,
        )


def checked(result: StepResult) -> StepResult:
    """Return the result.

    Raises:
        ValueError: A row failed: the figure would count tokens that were not computed.
    """
    if result.row_errors:
        error = next(iter(result.row_errors.values()))
        raise ValueError(f"{len(result.row_errors)} rows failed: {error.message}")
    return result
