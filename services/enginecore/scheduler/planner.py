"""The decision of a step: who computes how many tokens of what is known of them.

There is no prefill phase and no decode phase: each request has a computed count that chases its horizon,
and a step is a number of tokens for each request. Chunked prefill, prefix hits, preemption and overlap
fall out of that.

Where more is wanted than the budget of a step:

    ├─ decodes and short prompts ─┼──────── long prompts, the most urgent first ────────┼── quarter ──┤
                                                                                          those that wait; what they
                                                                                          leave goes to the long ones
"""

from __future__ import annotations

from math import inf

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler.request_states import Roster
from services.enginecore.scheduler.running_rows import Ints, Slots
from services.enginecore.scheduler.step_builder import LONG_SHARE, StepDraft, most_short, share_budget
from triptych.config import SchedulerConfig

_MOST_LOOKED_UP = 8192
"""Cached blocks that the requests admitted in one step find, the last of them apart: a quarter of a microsecond each.
Counted, not timed, so that a journal can be replayed."""


_MOST_NEW_BYTES = 8 << 20
"""Of the new rows of one step, the last of them apart, which takes `MAX_SUBMIT_BYTES` and its block ids at most. So a
step stays far below the 64 MiB of a message, whatever clients send."""


class StepPlanner:
    """Owned by the scheduler. What it gives out stands in the roster at once; counters advance when the
    draft is committed."""

    def __init__(self, config: SchedulerConfig, roster: Roster, block_size: int) -> None:
        self._config = config
        self._roster = roster
        self._block_size = block_size
        # A request takes at most this much of a step; the budget alone limits where no threshold is set.
        self._most_per_request = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._most_short = most_short(config)
        self._blocked: tuple[int, int] = (-1, 0)
        """Arrival of the last request that blocks were too few for, and the room in which it may fit."""

    def draft(self) -> StepDraft:
        """The running come first; the waiting only if nobody had to make room."""
        if len(self._roster.waiting):
            self._release_planned()
        draft = self._plan_running()
        self._roster.is_short_of_blocks = draft.num_preempted > 0
        if not draft.num_preempted:
            self._plan_waiting(draft)
            if draft.num_reserved and draft.budget:
                self._extend_chunks(draft)
        return draft

    def _release_planned(self) -> None:
        """Take the rows and blocks of those whose last token is planned: others need them while it is in flight."""
        rows = self._roster.rows
        slots = rows.running_order()
        for slot in slots[rows.horizon[slots] > rows.last[slots]].tolist():
            self._roster.preempt(rows.slot_to_request[slot])

    def _plan_running(self) -> StepDraft:
        """Share the budget, and preempt until the free blocks suffice for it.

        Who is preempted is settled before anyone is given anything. So a victim's tokens are refunded by
        sharing the budget again, and a block that a victim would have filled was never offered. Since those who stay
        may grow by what is refunded, there may be a second round.
        """
        rows, blocks, budget = self._roster.rows, self._roster.blocks, self._config.max_num_batched_tokens
        candidates: list[Request] | None = None
        num_preempted = 0
        while True:
            slots = rows.running_order()  # [r], like all that follows
            wanted = np.minimum(rows.wanted(slots), self._most_per_request)
            counts, num_reserved = self._share(slots, wanted, may_reserve=not num_preempted)
            ends = rows.computed[slots] + counts
            lacking = ends - rows.capacity[slots]
            growing = np.flatnonzero(lacking > 0)
            num_new_blocks = -(-lacking[growing] // self._block_size)
            num_lacking = int(num_new_blocks.sum()) - blocks.num_free
            if num_lacking <= 0:
                break
            if candidates is None:
                candidates = self._most_urgent_first()
            slot_to_need = dict(zip(slots[growing].tolist(), num_new_blocks.tolist(), strict=True))
            num_preempted += self._make_room(candidates, slot_to_need, num_lacking)
        draft = StepDraft(
            slots, wanted, counts, ends, budget - int(counts.sum()), num_preempted, num_reserved
        )
        if len(growing):
            draft.block_slots, draft.block_ids = self._roster.grow(slots[growing], ends[growing])
        return draft

    def _share(self, slots: Slots, wanted: Ints, *, may_reserve: bool) -> tuple[Ints, int]:
        """Return what each row gets of the budget, [len(slots)], and how much is left to those that wait."""
        budget = self._config.max_num_batched_tokens
        if wanted.sum() < budget:
            return wanted, 0
        is_long = wanted > self._most_short
        if not is_long.any():
            return share_budget(wanted, budget), 0
        counts = share_budget(np.where(is_long, 0, wanted), budget)
        rest, num_reserved = budget - int(counts.sum()), 0
        if may_reserve and self._roster.rows.num_free and len(self._roster.waiting):
            num_reserved = rest // LONG_SHARE
        places = self._by_urgency(slots, np.flatnonzero(is_long))
        counts[places] = share_budget(wanted[places], rest - num_reserved)
        return counts, num_reserved

    def _extend_chunks(self, draft: StepDraft) -> None:
        """Give the long prompts what those that wait have left, as far as there are blocks for it."""
        places = self._by_urgency(draft.slots, np.flatnonzero(draft.wanted > draft.counts))
        extra = share_budget((draft.wanted - draft.counts)[places], draft.budget)
        room = self._roster.rows.capacity[draft.slots[places]] - draft.ends[places]
        num_free = self._roster.blocks.num_free
        for place, count, held in zip(places.tolist(), extra.tolist(), room.tolist(), strict=True):
            count = min(count, held + num_free * self._block_size)
            num_free -= max(-(-(count - held) // self._block_size), 0)
            draft.counts[place] += count
            draft.ends[place] += count
            draft.budget -= count
        slots, ends = draft.slots[places], draft.ends[places]
        is_growing = ends > self._roster.rows.capacity[slots]
        if is_growing.any():
            block_slots, block_ids = self._roster.grow(slots[is_growing], ends[is_growing])
            draft.block_slots += block_slots
            draft.block_ids += block_ids

    def _by_urgency(self, slots: Slots, places: Slots) -> Slots:
        """Sort places in `slots` as they are served: by priority and arrival, or in running order."""
        if self._config.policy == "fcfs" or len(places) < 2:
            return places
        slot_to_request = self._roster.rows.slot_to_request
        by_urgency = sorted(
            places.tolist(), key=lambda place: _by_urgency(slot_to_request[int(slots[place])])
        )
        return np.array(by_urgency, np.intp)

    def _most_urgent_first(self) -> list[Request]:
        """Return those who run in the order in which they keep their blocks; the last makes room first."""
        running = self._roster.running
        if self._config.policy == "priority":
            running.sort(key=_by_urgency)
        return running

    def _make_room(self, candidates: list[Request], slot_to_need: dict[int, int], num_lacking: int) -> int:
        """Preempt, and take from the end of `candidates`, the fewest whose blocks and needs cover `num_lacking` blocks;
        returns how many."""
        victims: list[Request] = []
        freed = self._roster.blocks.blocks_freed_by(request.blocks for request in reversed(candidates))
        for num_freed in freed:
            victim = candidates[-1 - len(victims)]
            victims.append(victim)
            num_lacking -= num_freed + slot_to_need.get(victim.slot, 0)
            if num_lacking <= 0:
                break
        del candidates[-len(victims) :]
        for victim in victims:
            self._roster.preempt(victim)
        return len(victims)

    def _plan_waiting(self, draft: StepDraft) -> None:
        """Admit in order until rows, budget or blocks run out. Nobody is preempted, and nobody skips ahead but
        past long prompts that wait for others of their kind."""
        roster, blocks = self._roster, self._roster.blocks
        if not (draft.budget and roster.rows.num_free and len(roster.waiting)):
            return
        roster.settle()
        num_long_left = self._num_long_left(draft)
        num_promised = roster.rows.num_promised_blocks()
        num_looked_up = 0
        while draft.budget and roster.rows.num_free:
            if num_looked_up >= _MOST_LOOKED_UP or draft.num_new_bytes >= _MOST_NEW_BYTES:
                break
            request = roster.waiting.peek(pass_over_long=num_long_left <= 0)
            if request is None:
                break
            arrival, least_room = self._blocked
            if arrival == request.arrival and blocks.room - num_promised < least_room:
                roster.is_short_of_blocks = True
                break
            hits = roster.cached_blocks(request)
            num_looked_up += len(hits)
            num_known = len(request.token_ids)
            # A sequence that is cached whole still needs its last token computed, for the logits.
            num_computed = min(len(hits) * self._block_size, num_known - 1)
            count = min(num_known - num_computed, self._most_per_request)
            if count > draft.budget and not self._config.enable_chunked_prefill:
                break
            # All of it must fit before its first chunk runs, beside the later chunks of those that run, or long prompts
            # would evict each other.
            num_lacking = blocks.num_lacking(num_known, hits, num_promised)
            if num_lacking > 0:
                self._blocked = request.arrival, blocks.room - num_promised + num_lacking
                roster.is_short_of_blocks = True
                break
            count = min(count, draft.budget)
            num_long_left -= num_known - num_computed > self._most_per_request
            draft.add_row(request, roster.admit(request, hits, num_computed, count), count)
            num_promised += blocks.blocks_for(num_known) - len(request.blocks.block_ids)

    def _num_long_left(self, draft: StepDraft) -> float:
        """How many more long prompts may be in partial prefill: with more left to compute than one chunk."""
        if not (most := self._config.max_long_partial_prefills):
            return inf
        wanted = self._roster.rows.wanted(draft.slots)
        return most - int(np.count_nonzero(wanted > self._most_per_request))


def _by_urgency(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
