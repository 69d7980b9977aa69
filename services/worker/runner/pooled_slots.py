"""The rows of a runner that never sample: those that are pooled, and those that the model does not serve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.pooling import GENERATION, PoolingParams, Task
from triptych.types.step import NewRow, RowError
from triptych_services.worker.runner.pooling import PooledRow, Pooler

I64 = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class EnteredPooling:
    """One pooled row, from its entry on."""

    params: PoolingParams
    row: PooledRow
    """Its states so far."""


class PooledSlots:
    """Owned by the runner's rows."""

    def __init__(self, max_num_seqs: int, tasks: tuple[str, ...]) -> None:
        """
        Args:
            tasks: As of `ModelFacts`.
        """
        self._tasks = tasks
        self.pooler: Pooler | None = None
        """Set before the first row enters; None: rows are not pooled."""
        self.never_sample: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs]"""
        self.slot_to_pooling: dict[int, EnteredPooling] = {}
        """Slot to the pooling of rows that are pooled and have not been refused."""

    def check(self, row: NewRow) -> None:
        """Raise ProtocolViolation for a pooled row that holds more than a prompt, or leaves out states that it needs.

        Only a row that reads its last state alone may begin behind cached blocks.
        """
        pooling = row.content.pooling
        if pooling is None:
            return
        if row.num_known_tokens > row.num_prompt_tokens:
            raise ProtocolViolation(
                f"new_rows: slot {row.slot} is pooled, and has {row.num_known_tokens} tokens, of which only "
                f"{row.num_prompt_tokens} are its prompt"
            )
        skips = row.num_computed_tokens > 0 and self.pooler is not None
        if skips and self.pooler is not None and not self.pooler.row(pooling).reads_last_alone:
            raise ProtocolViolation(
                f"new_rows: slot {row.slot} begins at position {row.num_computed_tokens}, and needs the states of all "
                "its prompt"
            )

    def enter(self, row: NewRow) -> RowError | None:
        """Note a row that `samples` does not hold of. Returns why it cannot be served, None if it can."""
        self.never_sample[row.slot] = True
        pooling = row.content.pooling
        task = Task.GENERATE if pooling is None else pooling.task
        if pooling is None or self.pooler is None or task.label not in self._tasks:
            return RowError.of_client(f"task: {task.label} is none of this model's: {', '.join(self._tasks)}")
        refusal = self.pooler.refusal(pooling, row.num_prompt_tokens)
        if refusal is None:
            self.slot_to_pooling[row.slot] = EnteredPooling(pooling, self.pooler.row(pooling))
        return refusal

    def samples(self, row: NewRow) -> bool:
        """Return whether a row gets tokens."""
        return row.content.pooling is None and GENERATION in self._tasks

    def skip_ended(self, query_lens: I64, num_computed: I64, num_known: I64) -> None:
        """Set the length of rows to 0 of which all is computed, since nothing more becomes known.

        Args:
            query_lens: [max_num_seqs] like the others.
        """
        if self.never_sample.any():
            query_lens[self.never_sample & (num_computed >= num_known)] = 0

    def leave(self, slot: int) -> None:
        self.never_sample[slot] = False
        self.slot_to_pooling.pop(slot, None)
