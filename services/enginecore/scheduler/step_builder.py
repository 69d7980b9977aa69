"""A step while it is being decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler.running_rows import Ints, Slots
from triptych.config import SchedulerConfig
from triptych.types.step import U32, NewRow, StepPlan, empty_u32

LONG_SHARE = 4
"""A prompt that wants more than this part of a step is long, and leaves this part of its tokens to those that wait."""


def most_short(config: SchedulerConfig) -> int:
    """The most tokens that a row may want of one step and not be long."""
    return max(config.max_num_batched_tokens // LONG_SHARE, 1)


def share_budget(wanted: Ints, budget: int) -> Ints:
    """What each row gets of `budget` tokens, first come, first served: [len(wanted)]."""
    if wanted.sum() <= budget:
        return wanted
    wanted_before = wanted.cumsum() - wanted
    return np.clip(budget - wanted_before, 0, wanted)


@dataclass(slots=True, eq=False)
class StepBuilder:
    """Owned by one call of `Scheduler.schedule`."""

    slots: Slots
    """[r] rows that were running before this step, in running order."""
    wanted: Ints
    """[r] tokens that each could compute."""
    counts: Ints
    """[r] tokens that each computes; 0 skips it."""
    ends: Ints
    """[r] where that leaves its computed count."""
    budget: int
    """Tokens left."""
    num_preempted: int
    """Requests that had to make room."""
    num_reserved: int
    """Tokens of `budget` that long prompts leave to those that wait."""
    block_slots: list[int] = field(default_factory=list)
    """[b] the running rows that grow, once per block."""
    block_ids: list[int] = field(default_factory=list)
    """[b] the blocks that they grow by."""
    admitted: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    """Parallel to `admitted`."""
    new_counts: list[int] = field(default_factory=list)
    num_new_bytes: int = 0
    """What the new rows and their contents take in a message, at most."""
    _content_ids: set[int] = field(default_factory=set)
    """id() of each content that is counted."""

    @property
    def is_empty(self) -> bool:
        return not self.new_rows and not self.counts.any()

    def add_row(self, request: Request, row: NewRow, count: int) -> None:
        """A request that enters and computes `count` tokens at once."""
        self.admitted.append(request)
        self.new_rows.append(row)
        self.new_counts.append(count)
        self.budget -= count
        self.num_new_bytes += row.num_bytes
        if id(row.content) not in self._content_ids:
            self._content_ids.add(id(row.content))
            self.num_new_bytes += row.content.num_bytes

    def close(self) -> None:
        """Let the new rows stand in the columns beside the others."""
        if self.new_rows:
            starts = [row.num_computed_tokens for row in self.new_rows]
            counts = np.array(self.new_counts, np.int64)
            self.slots = np.concatenate([self.slots, np.array([row.slot for row in self.new_rows], np.intp)])
            self.counts = np.concatenate([self.counts, counts])
            self.ends = np.concatenate([self.ends, counts + np.array(starts, np.int64)])

    def to_plan(self, step_id: int, last_result_seen: int, removed_slots: Sequence[int]) -> StepPlan:
        """The closed draft as the worker takes it: only what is not one token per row is spelled out."""
        chunk_slots = chunk_lengths = skipped_slots = empty_u32()
        if (self.counts != 1).any():
            is_chunk, is_skipped = self.counts > 1, self.counts == 0
            chunk_slots = _column(self.slots[is_chunk])
            chunk_lengths = _column(self.counts[is_chunk])
            skipped_slots = _column(self.slots[is_skipped])
        return StepPlan(
            step_id=step_id,
            last_result_seen=last_result_seen,
            removed_slots=_column(removed_slots),
            new_rows=tuple(self.new_rows),
            chunk_slots=chunk_slots,
            chunk_lengths=chunk_lengths,
            skipped_slots=skipped_slots,
            block_slots=_column(self.block_slots),
            block_ids=_column(self.block_ids),
            num_tokens=int(self.counts.sum()),
        )


def _column(values: Sequence[int] | Ints | Slots) -> U32:
    """A read-only copy as u32."""
    if not len(values):
        return empty_u32()
    column = np.array(values, np.uint32)
    column.flags.writeable = False
    return column
