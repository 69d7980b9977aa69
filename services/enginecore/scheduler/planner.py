"""Decides which requests compute how many of their tokens in a step.

There is no prefill phase and no decode phase. Each request has a computed count that follows the count of its expected
tokens, and a step is a number of tokens for each request. Chunked prefill, prefix hits, preemption and overlap follow
from that.

If requests want more tokens than the budget of a step has:

    ├─ decodes and short prompts ─┼──────── long prompts, the most urgent first ────────┼── quarter ──┤
                                                                                          waiting requests; what they
                                                                                          leave goes to the long ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from triptych.config import SchedulerConfig
from triptych_services.enginecore.kv.groups import Count, PoolCounts
from triptych_services.enginecore.kv.state_snapshots import StateSnapshots
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.microbatches import Microbatches
from triptych_services.enginecore.scheduler.pace import PooledShare
from triptych_services.enginecore.scheduler.policy import SchedulingPolicy
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.running_rows import Ints, Slots
from triptych_services.enginecore.scheduler.step_builder import StepBuilder

LONG_SHARE = 4
"""A prompt that wants more than this part of a step is long, and leaves this part of its tokens to waiting requests."""

_MAX_LOOKED_UP = 8192
"""Cached blocks that the requests admitted in one step may find together, not counting the last of them. Each takes a
quarter of a microsecond. The bound is a count rather than a time, so that a journal can be replayed."""

_MAX_NEW_BYTES = 8 << 20
"""Bytes of the new rows of one step, not counting the last, which takes at most `MAX_SUBMIT_BYTES` and its block ids.
So a step stays far below the 64 MiB of a message, whatever clients send."""


def max_short_tokens(config: SchedulerConfig) -> int:
    """Return the most tokens that a row may want of one step without being long."""
    return max(config.max_num_batched_tokens // LONG_SHARE, 1)


def share_budget(wanted: Ints, budget: int) -> Ints:
    """Return how many of `budget` tokens each row gets, first come, first served: [len(wanted)]."""
    if np.add.reduce(wanted) <= budget:
        return wanted
    wanted_before = wanted.cumsum() - wanted
    return np.clip(budget - wanted_before, 0, wanted)


class StepPlanner:
    """Decides steps. The scheduler owns it.

    Rows and blocks that it gives out are in `RequestStates` at once; counters advance when the step is committed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        states: RequestStates,
        microbatches: Microbatches,
        block_size: int,
        max_samples_per_row: int = 1,
        pooled_share: PooledShare | None = None,
    ) -> None:
        """`pooled_share`: As of `create_limits`."""
        self._config = config
        self._pooled_share = pooled_share
        self._max_guesses = max_samples_per_row - 1
        self._policy = policy
        self._states = states
        self._microbatches = microbatches
        self._block_size = block_size
        # A request takes at most this much of a step; only the budget limits it where no threshold is set.
        self._max_per_request = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._max_short = max_short_tokens(config)
        self._blocked: tuple[int, Count] = (-1, 0)
        """(arrival, fit credit) of the last request that did not fit; it is not tried again below that credit."""

    def build(self) -> StepBuilder:
        """Decide a step: running requests first, and waiting ones only if none had to be preempted."""
        self._states.shared_prompts.release_planned(self._states.rows)
        if self._states.blocks.releasing:
            self._release_unseen()
        if self._states.blocks.snapshots is not None:
            self._states.blocks.snapshots.release_read()
        if self._states.waiting.num_ready:
            self._release_planned()
        build = (self.plan_decode() if self._states.rows.slot_to_request else None) or self._plan_running()
        self._states.is_short_of_blocks = build.num_preempted > 0
        if not build.num_preempted:
            self._plan_waiting(build)
            if not self._states.is_short_of_blocks:
                pulls, num_running = self._states.transfers.pulls, len(self._states.rows.slot_to_request)
                if len(pulls):  # each row may need a further block soon
                    pulls.begin(self._num_promised() + num_running)
            if build.num_reserved and build.budget:
                self._extend_chunks(build)
        return build

    def _release_planned(self) -> None:
        """Preempt requests after their last token is planned: others need the rows while it is in flight."""
        rows = self._states.rows
        slots = rows.running_order()
        for slot in slots[rows.num_expected[slots] - rows.num_uncertain[slots] > rows.last[slots]].tolist():
            self._states.preempt(rows.slot_to_request[slot])

    def plan_decode(self) -> StepBuilder | None:
        """Return the step in which no running row computes more than one token. None: that is not what comes next.

        It is the same step as `_plan_running` returns, at a third of the time.
        """
        rows, blocks, max_tokens = self._states.rows, self._states.blocks, self._config.max_num_batched_tokens
        slots = rows.running_order()
        if len(slots) > max_tokens or rows.num_pooled or (rows.has_guesses and self._max_guesses):
            return None
        if not self._microbatches.are_whole or (counts := rows.decoding()) is None:
            return None
        is_decode = counts is rows.running().ones
        is_growing = (rows.computed >= rows.capacity)[slots]
        growing = slots[is_growing if is_decode else is_growing & (counts > 0)]
        if len(growing) and not blocks.budget.has_one_for(len(growing)):
            return None
        if self._pooled_share is not None:
            self._pooled_share.limit(rows, slots, counts)
        build = StepBuilder(
            slots=slots,
            wanted=counts,
            counts=counts,
            ends=rows.computed[slots] + counts,
            guesses=None,
            max_tokens=max_tokens,
            budget=max_tokens - (len(slots) if is_decode else int(counts.sum())),
            num_preempted=0,
            num_reserved=0,
            is_decode=is_decode,
        )
        if len(growing):
            ends = None if blocks.grows_evenly else rows.capacity[growing] + 1
            build.add_growths(growing, self._states.grow(growing, ends))
        if blocks.snapshots is not None:
            self._keep_states(build, blocks.snapshots)
        return build

    def _plan_running(self) -> StepBuilder:
        """Share the budget, and preempt until the free blocks suffice for it.

        Requests are preempted before any is given anything. So a victim's tokens are refunded by sharing the budget
        again, and a block that a victim would have filled was never cached. The others may grow by what is refunded, so
        there may be a second round.
        """
        rows, blocks, budget = self._states.rows, self._states.blocks, self._config.max_num_batched_tokens
        candidates: list[Request] | None = None
        num_preempted = 0
        while True:
            slots = rows.running_order()  # [r], like all that follows
            wanted = np.minimum(rows.wanted(slots), self._max_per_request)
            if (every := blocks.step_end_every) > 0:
                wanted = np.minimum(wanted, every - rows.computed[slots] % every)
                to_snapshot = rows.snapshot_end[slots] - rows.computed[slots]
                wanted = np.where(to_snapshot > 0, np.minimum(wanted, to_snapshot), wanted)
            wanted = self._microbatches.limit(
                slots, wanted, may_run_ahead=not (self._states.waiting.num_ready and rows.num_free)
            )
            if self._pooled_share is not None:
                wanted = self._pooled_share.limit(rows, slots, wanted)
            counts, num_reserved = self._share(slots, wanted, may_reserve=not num_preempted)
            ends, capacities = rows.computed[slots] + counts, rows.capacity[slots]
            growing = (ends > capacities).nonzero()[0]
            growth = capacities[growing], ends[growing]
            num_lacking = blocks.budget.num_lacking_to_grow(*growth)
            if num_lacking <= 0:
                break
            if self._states.transfers.pulls.give_way():
                continue
            if candidates is None:
                candidates = self._policy.running_order(self._states.running)
            slot_to_need = dict(zip(slots[growing].tolist(), blocks.budget.needs(*growth), strict=True))
            victims = self.choose_victims(candidates, slot_to_need, num_lacking)
            del candidates[-len(victims) :]
            for victim in victims:
                self._states.preempt(victim)
            num_preempted += len(victims)
        build = StepBuilder(
            slots=slots,
            wanted=wanted,
            counts=counts,
            ends=ends,
            guesses=None,
            max_tokens=budget,
            budget=budget - int(np.add.reduce(counts)),
            num_preempted=num_preempted,
            num_reserved=num_reserved,
        )
        if rows.has_guesses and not num_preempted:
            self._add_guesses(build)
            if build.guesses is not None:
                ends = ends + build.guesses
                growing = np.flatnonzero(ends > rows.capacity[slots])
        if len(growing):
            build.add_growths(slots[growing], self._states.grow(slots[growing], ends[growing]))
        if blocks.snapshots is not None:
            self._keep_states(build, blocks.snapshots)
        return build

    def _keep_states(self, build: StepBuilder, snapshots: StateSnapshots) -> None:
        """Keep the states of rows that have come to the end of their prompt, while there are pages to go on with.

        No request is preempted for it, and what is promised to prompts is left to them. Without a page the row goes on
        in its own, and its state is not kept.
        """
        rows, slots = self._states.rows, build.slots
        ends = rows.snapshot_end[slots]
        places = np.flatnonzero((ends > 0) & (rows.computed[slots] == ends) & (build.counts > 0))
        if not len(places):
            return
        promised = self._num_promised()
        assert isinstance(promised, PoolCounts), "there are groups"
        num_pages = snapshots.num_free - promised.state
        for slot in slots[places].tolist():
            request, num_tokens = rows.slot_to_request[slot], int(rows.computed[slot])
            if num_pages > 0 and snapshots.keep(request.blocks, request.token_ids, num_tokens):
                build.add_page(slot, snapshots.go_on(request.blocks, num_tokens))
                num_pages -= 1

    def _add_guesses(self, build: StepBuilder) -> None:
        """Let sampling rows with guesses get several tokens, within budget, blocks and the rest of their output.

        No request is preempted for a guess, and a long prompt or a waiting request is not kept from its reserved part.
        Where there are too few free blocks for all guesses, rows get those that fit into their own.
        """
        rows, slots = self._states.rows, build.slots
        is_sampling = (build.counts > 0) & (build.ends == rows.num_expected[slots])
        ready = np.minimum(rows.num_guesses[slots], self._max_guesses)
        room = np.minimum(rows.last[slots] - rows.num_expected[slots], ready)
        guesses = share_budget(np.where(is_sampling, room, 0), build.budget - build.num_reserved)
        if self._states.blocks.budget.num_lacking_to_grow(rows.capacity[slots], build.ends + guesses) > 0:
            guesses = np.clip(rows.capacity[slots] - build.ends, 0, guesses)
        if guesses.any():
            build.guesses = guesses
            build.budget -= int(guesses.sum())

    def _share(self, slots: Slots, wanted: Ints, *, may_reserve: bool) -> tuple[Ints, int]:
        """Return what each row gets of the budget, [len(slots)], and how much is left to waiting requests."""
        budget = self._config.max_num_batched_tokens
        if np.add.reduce(wanted) < budget:
            return wanted, 0
        is_long = wanted > self._max_short
        if not is_long.any():
            return share_budget(wanted, budget), 0
        counts = share_budget(np.where(is_long, 0, wanted), budget)
        rest, num_reserved = budget - int(counts.sum()), 0
        if may_reserve and self._states.rows.num_free and self._states.waiting.num_ready:
            num_reserved = rest // LONG_SHARE
        places = self._by_urgency(slots, np.flatnonzero(is_long))
        counts[places] = share_budget(wanted[places], rest - num_reserved)
        return counts, num_reserved

    def _extend_chunks(self, build: StepBuilder) -> None:
        """Give long prompts the tokens that waiting requests left over, if there are blocks for them."""
        places = self._by_urgency(build.slots, np.flatnonzero(build.wanted > build.counts))
        extra = share_budget((build.wanted - build.counts)[places], build.budget)
        rows, blocks = self._states.rows, self._states.blocks
        taken: Count = 0
        for place, count in zip(places.tolist(), extra.tolist(), strict=True):
            capacity, end = int(rows.capacity[build.slots[place]]), int(build.ends[place])
            count, taken = blocks.budget.most_tokens(capacity, end, count, taken)
            build.counts[place] += count
            build.ends[place] += count
            build.budget -= count
        slots, ends = build.slots[places], build.ends[places]
        is_growing = ends > rows.capacity[slots]
        if is_growing.any():
            slots, ends = slots[is_growing], ends[is_growing]
            build.add_growths(slots, self._states.grow(slots, ends))

    def _by_urgency(self, slots: Slots, places: Slots) -> Slots:
        """Sort places in `slots` as the policy serves their requests."""
        if len(places) < 2:
            return places
        slot_to_request = self._states.rows.slot_to_request
        slot_to_place = dict(zip(slots[places].tolist(), places.tolist(), strict=True))
        ordered = self._policy.running_order([slot_to_request[slot] for slot in slot_to_place])
        return np.array([slot_to_place[request.slot] for request in ordered], np.intp)

    def choose_victims(
        self, candidates: Sequence[Request], slot_to_need: Mapping[int, Count], num_lacking: Count
    ) -> list[Request]:
        """Return the fewest requests with blocks and needs that cover `num_lacking` blocks.

        Args:
            candidates: Running requests. The victims are taken from its end.
            slot_to_need: Slot to the blocks that its request would grow by.
            num_lacking: Blocks that are wanted and not free.
        """
        victims: list[Request] = []
        freed = self._states.blocks.blocks_freed_by(request.blocks for request in reversed(candidates))
        for num_freed in freed:
            victim = candidates[-1 - len(victims)]
            victims.append(victim)
            num_lacking -= num_freed + slot_to_need.get(victim.slot, 0)
            if num_lacking <= 0:
                break
        return victims

    def _plan_waiting(self, build: StepBuilder) -> None:
        """Admit in order until rows, budget or blocks run out.

        No request is preempted for it. Requests are passed only where they are held, or held back by a limit.
        """
        states, blocks = self._states, self._states.blocks
        if not (build.budget and states.rows.num_free and states.waiting.num_ready):
            return
        states.shares.settle(states.rows)
        states.waiting.begin_step(states.rows, build.slots)
        num_promised = self._num_promised()
        num_looked_up = 0
        while build.budget and states.rows.num_free:
            if num_looked_up >= _MAX_LOOKED_UP or build.num_new_bytes >= _MAX_NEW_BYTES:
                break
            request = states.waiting.peek()
            if request is None:
                break
            arrival, min_credit = self._blocked
            if arrival == request.arrival and blocks.budget.fit_credit - num_promised < min_credit:
                if self._make_way(request):
                    continue
                states.is_short_of_blocks = True
                break
            hits = states.cached_blocks(request)
            num_looked_up += len(hits)
            num_known = len(request.token_ids)
            # A sequence that is cached whole still needs its last token computed, for the logits.
            num_computed = min(len(hits) * self._block_size, num_known - 1)
            count = min(num_known - num_computed, self._max_per_request)
            if (every := blocks.step_end_every) > 0:
                count = min(count, every - num_computed % every)
                count = min(count, (self._snapshot_end(request, num_computed) - num_computed) or count)
            if count > build.budget and not self._config.enable_chunked_prefill:
                break
            # All of it must fit before its first chunk runs, beside the later chunks of those that run, or long prompts
            # would evict each other.
            num_lacking = blocks.budget.num_lacking(num_known, hits, num_promised)
            if num_lacking > 0:
                if self._make_way(request):
                    continue
                self._blocked = request.arrival, blocks.budget.fit_credit - num_promised + num_lacking
                states.is_short_of_blocks = True
                break
            count = min(count, build.budget)
            if self._pooled_share is not None and request.is_pooled:
                count = min(count, self._pooled_share.num_left)
            states.waiting.note_admitted(request, num_known - num_computed)
            build.add_row(request, states.admit(request, hits, num_computed, count), count)
            if blocks.snapshots is not None:
                self._enter_with_state(build, blocks.snapshots, request, num_computed)
            num_promised += blocks.budget.num_outstanding(request.blocks, num_known)

    def _enter_with_state(
        self, build: StepBuilder, snapshots: StateSnapshots, request: Request, num_computed: int
    ) -> None:
        """Note where the state of a new row is kept, and let it go on from that of a snapshot on a page of its own."""
        end = self._snapshot_end(request, num_computed)
        self._states.rows.snapshot_end[request.slot] = end if end > num_computed else 0
        if num_computed % self._states.blocks.step_end_every:
            build.add_page(request.slot, snapshots.go_on(request.blocks, num_computed))

    def _snapshot_end(self, request: Request, num_computed: int) -> int:
        """Return the tokens of a prompt behind which its state is kept; `num_computed` if it is not."""
        snapshots = self._states.blocks.snapshots
        if snapshots is None or request.is_pooled or not self._states.blocks.is_cached(request.blocks):
            return num_computed
        num_saved_from = (
            0 if request.kv_lease else num_computed
        )  # another engine goes on behind it in any case
        return max(snapshots.end_for(request.num_prompt_tokens, num_saved_from), num_computed)

    def _num_promised(self) -> Count:
        """Count the blocks that running rows still need for known tokens: those of prompts computed in chunks."""
        rows, budget = self._states.rows, self._states.blocks.budget
        slots = rows.running_order()
        return budget.num_promised(rows.known[slots], rows.capacity[slots], rows.released[:, slots])

    def _release_unseen(self) -> None:
        """Give back the blocks of running rows that no later query sees.

        Only blocks of known tokens: their content stays in the cache. What a step in flight reads of them is read
        before any later step writes to them.
        """
        rows, blocks, block_size = self._states.rows, self._states.blocks, self._block_size
        slots = rows.running_order()
        of_slot = np.minimum(rows.known, rows.computed - rows.num_uncertain)  # of empty ones as well
        for group in blocks.releasing:
            released = rows.released[group.index]
            crossing = slots[group.has_needless(of_slot, released)[slots]]
            if not len(crossing):
                continue
            reached = of_slot[crossing]
            nums_needless = group.nums_needless(reached)
            requests = list(map(rows.slot_to_request.__getitem__, crossing.tolist()))
            stale = [
                (request.blocks, request.token_ids, num_tokens)
                for request, num_tokens in zip(requests, reached.tolist(), strict=True)
                if num_tokens // block_size > request.blocks.num_cached
            ]
            if stale:
                blocks.cache_full_blocks(stale)
            blocks.release_unseen(group, [each.blocks for each in requests], nums_needless.tolist())
            released[crossing] = nums_needless

    def _make_way(self, request: Request) -> bool:
        """Take the blocks of a pull for the next request, if nothing runs that will give back some.

        Returns:
            Whether there was a pull.
        """
        states = self._states
        return not states.rows.slot_to_request and states.transfers.pulls.give_way(request)
