"""A step while it is being decided."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triptych.types.kv_transfer import KvOrders
from triptych.types.step import U32, NewRow, StepPlan, empty_u32
from triptych_services.enginecore.kv.manager import Growth
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.running_rows import Ints, Slots


@dataclass(slots=True, eq=False)
class StepBuilder:
    """A step while it is being decided. One call of `Scheduler.schedule` owns it."""

    slots: Slots
    """[r] rows that were running before this step, in the order of admission."""
    wanted: Ints
    """[r] tokens that each could compute."""
    counts: Ints
    """[r] tokens that each computes; 0 skips it."""
    ends: Ints
    """[r] computed count of each after the step, without guesses."""
    guesses: Ints | None
    """[r] tokens that each may get beyond the first; None: no row may."""
    max_tokens: int
    """Tokens that the step may compute."""
    budget: int
    """Tokens of them that are left."""
    num_preempted: int
    """Requests that were preempted."""
    num_reserved: int
    """Tokens of `budget` that long prompts leave to waiting requests."""
    is_decode: bool = False
    """Whether all running rows compute one token each and sample, and no other row computes."""
    block_slots: list[int] = field(default_factory=list)
    """[b] the running rows that grow, once per block."""
    block_ids: list[int] = field(default_factory=list)
    """[b] the blocks that they grow by."""
    block_groups: list[int] = field(default_factory=list)
    """[b] the group of each; empty where there is one."""
    state_slots: list[int] = field(default_factory=list)
    """[s] rows that go on from their page of states on another one."""
    state_pages: list[int] = field(default_factory=list)
    """[s] the pages that they go on with."""
    admitted: list[Request] = field(default_factory=list)
    """[n] requests that enter."""
    new_rows: list[NewRow] = field(default_factory=list)
    """[n] their rows."""
    new_counts: list[int] = field(default_factory=list)
    """[n] tokens that each of them computes."""
    num_new_bytes: int = 0
    """Bytes that the new rows and their contents take in a message, at most."""
    _content_ids: set[int] = field(default_factory=set)
    """id() of each content that is counted in `num_new_bytes`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, guesses included."""
        return self.max_tokens - self.budget

    def add_row(self, request: Request, row: NewRow, count: int) -> None:
        """Add a request that enters and computes `count` tokens."""
        self.admitted.append(request)
        self.new_rows.append(row)
        self.new_counts.append(count)
        self.budget -= count
        self.num_new_bytes += row.num_bytes
        if id(row.content) not in self._content_ids:
            self._content_ids.add(id(row.content))
            self.num_new_bytes += row.content.num_bytes

    def add_growths(self, slots: Slots, growths: Sequence[Growth]) -> None:
        """Add the blocks of running rows that grow, group by group."""
        nums_new: Ints | None = None
        repeated: list[int] = slots.tolist()
        for growth in growths:
            if growth.nums_new is not nums_new:  # groups of equal blocks share it
                assert growth.nums_new is not None, "all tables grow by one block each, or none does"
                nums_new, repeated = growth.nums_new, slots.repeat(growth.nums_new).tolist()
            self.block_slots += repeated
            self.block_ids += growth.block_ids
            if growth.group is not None:
                self.block_groups += [growth.group] * len(growth.block_ids)

    def add_page(self, slot: int, page: int) -> None:
        """Let a row that computes go on with another page of states."""
        self.state_slots.append(slot)
        self.state_pages.append(page)

    def close(self) -> None:
        """Append the new rows to the columns of the others."""
        if self.new_rows:
            self.is_decode = False
            starts = [row.num_computed_tokens for row in self.new_rows]
            counts = np.array(self.new_counts, np.int64)
            self.slots = np.concatenate([self.slots, np.array([row.slot for row in self.new_rows], np.intp)])
            self.counts = np.concatenate([self.counts, counts])
            self.ends = np.concatenate([self.ends, counts + np.array(starts, np.int64)])
            if self.guesses is not None:
                self.guesses = np.concatenate([self.guesses, np.zeros_like(counts)])

    def to_plan(
        self,
        step_id: int,
        last_result_seen: int,
        removed_slots: Sequence[int],
        kv_orders: KvOrders | None = None,
    ) -> StepPlan:
        """Return the closed step as the worker takes it, which lists only rows that do not compute one token."""
        nothing = empty_u32()
        chunk_slots = chunk_lengths = skipped_slots = nothing
        if not self.is_decode and np.count_nonzero(self.counts == 1) < len(self.counts):
            is_chunk, is_skipped = self.counts > 1, self.counts == 0
            chunk_slots = _column(self.slots[is_chunk])
            chunk_lengths = _column(self.counts[is_chunk])
            skipped_slots = _column(self.slots[is_skipped])
        sample_slots = sample_limits = nothing
        if self.guesses is not None:
            is_guessing = self.guesses > 0
            sample_slots = _column(self.slots[is_guessing])
            sample_limits = _column(1 + self.guesses[is_guessing])
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
            block_groups=_column(self.block_groups) if self.block_groups else nothing,
            state_slots=_column(self.state_slots) if self.state_slots else nothing,
            state_pages=_column(self.state_pages) if self.state_pages else nothing,
            sample_slots=sample_slots,
            sample_limits=sample_limits,
            num_tokens=self.num_tokens,
            kv_orders=kv_orders,
            may_defer_rows=True,
        )


def _column(values: Sequence[int] | Ints | Slots) -> U32:
    """Return a read-only copy as u32."""
    if not len(values):
        return empty_u32()
    if isinstance(values, list):  # numpy takes twice as long to read numbers of Python one by one
        column: U32 = np.frombuffer(array("I", values), np.uint32)
    else:
        column = np.array(values, np.uint32)
    column.flags.writeable = False
    return column
