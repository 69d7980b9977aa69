"""The worker's memory of the texts that an encoder serves: which slots are taken, and no more.

A text is computed whole in the step in which it enters. Afterwards its slot holds nothing, and waits to be freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from triptych.errors import ProtocolViolation
from triptych.types.facts import WorkerFacts
from triptych.types.pooling import PoolingParams, Task
from triptych.types.step import U32, NewRow, RowError, RowKey, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text of a step."""

    key: RowKey
    token_ids: U32
    pooling: PoolingParams


@dataclass(slots=True, eq=False)
class EncoderStep:
    """The texts that a step computes, and the rows that it refuses."""

    texts: list[Text] = field(default_factory=list)
    row_errors: dict[RowKey, RowError] = field(default_factory=dict)


class EncoderRows:
    """Owned by the runner's thread; changed only by plans."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._facts = facts
        self._live = np.zeros(facts.max_num_seqs, np.bool_)

    def clear(self) -> None:
        """Forget every row."""
        self._live[:] = False

    def apply(self, plan: StepPlan) -> EncoderStep:
        """Carry out a plan's removals, and return the texts that enter.

        A row of an earlier step has nothing left to compute, whatever the plan says of it.

        Raises:
            ProtocolViolation: The plan contradicts the rows; they are undefined until `clear()`.
        """
        for slot in plan.removed_slots.tolist():
            if slot >= self._live.size or not self._live[slot]:
                raise ProtocolViolation(f"removed_slots: slot {slot} is not live")
            self._live[slot] = False
        slot_to_length = dict(zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True))
        step = EncoderStep()
        num_tokens = 0
        for row in plan.new_rows:
            self._check(row, slot_to_length.get(row.slot, 1))
            self._live[row.slot] = True
            num_tokens += row.num_prompt_tokens
            refusal = _refusal(row)
            if refusal is not None:
                step.row_errors[row.key] = refusal
            elif row.content.pooling is not None:
                step.texts.append(Text(row.key, row.content.prompt_token_ids, row.content.pooling))
        if num_tokens > self._facts.max_num_batched_tokens:
            raise ProtocolViolation(
                f"the step has {num_tokens} tokens; max_num_batched_tokens is {self._facts.max_num_batched_tokens}"
            )
        return step

    def _check(self, row: NewRow, length: int) -> None:
        name, facts = f"new_rows: slot {row.slot}", self._facts
        if row.slot >= self._live.size:
            raise ProtocolViolation(f"{name} is not below max_num_seqs {self._live.size}")
        if self._live[row.slot]:
            raise ProtocolViolation(f"{name} is live; remove it first")
        num_tokens = row.num_prompt_tokens
        if not 0 < num_tokens <= facts.model.max_model_len:
            raise ProtocolViolation(
                f"{name} has {num_tokens} tokens; max_model_len is {facts.model.max_model_len}"
            )
        if (row.num_computed_tokens, row.num_known_tokens, length) != (0, num_tokens, num_tokens):
            raise ProtocolViolation(
                f"{name} computes {length} tokens from {row.num_computed_tokens} on, of {row.num_known_tokens}; an "
                f"encoder computes the {num_tokens} of a text at once"
            )
        largest = int(row.content.prompt_token_ids.max())
        if largest >= facts.model.vocab_size:
            raise ProtocolViolation(
                f"{name} holds token id {largest}; the vocabulary has {facts.model.vocab_size}"
            )


def _refusal(row: NewRow) -> RowError | None:
    """Return why a row cannot be served; None if it can."""
    pooling = row.content.pooling
    if pooling is None or pooling.task is Task.GENERATE:
        return RowError.of_client("task: the model is an encoder, which generates nothing")
    if row.content.adapter:
        return RowError.of_client("adapter: the model is an encoder, which takes none here")
    return None
