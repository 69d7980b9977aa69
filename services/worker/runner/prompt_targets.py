"""The prompt tokens that a step scores, for rows that ask for their log-probabilities. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import PromptLogprobs, RowError, RowKey
from triptych_services.worker.runner.request_rows import RequestRows, StepRows

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The consecutive prompt tokens of one row that a step scores."""

    key: RowKey
    first_position: int
    num_positions: int
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptTargets:
    """The prompt tokens that a step scores, row after row."""

    rows: tuple[ScoredRow, ...]
    tokens: I64
    """[num_targets] index of the step's token that predicts each target."""
    token_ids: I64
    """[num_targets]"""

    @property
    def num_top(self) -> int:
        """The largest number of alternatives that a row asks for."""
        return max(row.num_top for row in self.rows)


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The results of a step's targets."""

    reported: Mapping[RowKey, PromptLogprobs]
    failures: Mapping[RowKey, RowError]
    """Errors of rows with NaN or infinity among their logits; these report nothing."""


def take_prompt_targets(rows: RequestRows, step: StepRows) -> PromptTargets | None:
    """Find the tokens that a step scores, before the step counts as computed; None if there are none.

    A row is examined until the first step after its prompt. Steps without rows that ask cost nothing.
    """
    if not rows.slot_to_prompt_top:
        return None
    scored: list[ScoredRow] = []
    tokens: list[I64] = []
    token_ids: list[NDArray[np.int32]] = []
    asking = np.flatnonzero(np.isin(step.slots, list(rows.slot_to_prompt_top)))
    computed_lens = step.computed_lens
    first_tokens = np.cumsum(computed_lens) - computed_lens  # [num_rows]
    for row in asking.tolist():
        slot, start = int(step.slots[row]), int(step.starts[row])
        num_prompt = int(rows.num_prompt[slot])
        # the state of the token at position p predicts the token at p + 1
        first = max(start + 1, int(rows.prompt_logprobs_start[slot]))
        end = min(start + int(step.query_lens[row]) + 1, num_prompt)
        num_top = rows.slot_to_prompt_top[slot]
        if start >= num_prompt:
            del rows.slot_to_prompt_top[slot]
        if first >= end:
            continue
        scored.append(ScoredRow(rows.key_of(slot), first, end - first, num_top))
        tokens.append(np.arange(first, end) + (int(first_tokens[row]) - start - 1))
        token_ids.append(rows.token_ids[slot, first:end])
    if not scored:
        return None
    return PromptTargets(tuple(scored), np.concatenate(tokens), np.concatenate(token_ids).astype(np.int64))
