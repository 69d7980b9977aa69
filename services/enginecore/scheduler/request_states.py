"""The state of each request, and what every change of state entails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.step import NewRow, RowKey, empty_u32
from triptych_services.enginecore.kv.manager import BlockManager, Growth
from triptych_services.enginecore.kv.remote import LEASE_S, KvTransfers
from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.scheduler.fairness import FairShares
from triptych_services.enginecore.scheduler.heap import Key, LazyHeap
from triptych_services.enginecore.scheduler.policy import AdmissionLimit, SchedulingPolicy
from triptych_services.enginecore.scheduler.request_index import RequestIndex
from triptych_services.enginecore.scheduler.running_rows import Ints, RunningRows, Slots
from triptych_services.enginecore.scheduler.shared_prompts import SharedPrompts
from triptych_services.enginecore.scheduler.waiting_queue import WaitingQueue, WaitsFor

# Between the attempts to sample a request before its form is compiled. A usual form takes milliseconds, the slowest
# that a frontend lets pass some seconds; each attempt computes the end of its tokens again.
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_MAX_DOUBLINGS = 10


class RequestStates:
    """All requests that have not ended. The scheduler owns it and decides which of them move.

    add -> waiting -- admit --> running -- end -->
              ^                    |
              |<---- requeue ------|
              |                    | preempt
              '---- draining <-----'
        finish_draining   waiting as well, but held until the results in flight have come
    """

    def __init__(
        self,
        *,
        rows: RunningRows,
        blocks: BlockManager,
        policy: SchedulingPolicy,
        limits: Sequence[AdmissionLimit] = (),
        kv_lease_s: float = LEASE_S,
        last_state_tasks: Sequence[str] = (),
    ) -> None:
        """`last_state_tasks`: As of `ModelFacts`."""
        self.index = RequestIndex()
        """All requests that have not ended."""
        self.rows = rows
        self.blocks = blocks
        self._last_state_tasks = frozenset(last_state_tasks)
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.shares, policy, limits)
        self.shared_prompts = SharedPrompts(self.waiting)
        self.transfers = KvTransfers(
            blocks, lambda request: self.waiting.release(request, WaitsFor.REMOTE_KV), kv_lease_s
        )
        self.draining: dict[tuple[int, int], Request] = {}
        """Slot and slot version -> waiting request that results for this row are still to come for."""
        self.removed_slots: list[int] = []
        """Slots that are empty here and not in the worker. The next plan removes them there."""
        self.is_short_of_blocks = False
        """Whether only a lack of blocks kept a request from running in the last step planned."""
        self._deferred: LazyHeap[Request] = LazyHeap(_by_deferral)
        """Requests that wait for the worker to compile their form."""

    @property
    def running(self) -> list[Request]:
        """A copy of the list of running requests, in the order of their admission."""
        return list(self.rows.slot_to_request.values())

    @property
    def num_usable_rows(self) -> int:
        """Requests that can run at once: one for each row, or as many as run now while blocks are short."""
        return max(len(self.rows.slot_to_request), 1) if self.is_short_of_blocks else len(self.rows.known)

    @property
    def num_entries(self) -> int:
        """Number of entries in all heaps, those of requests that left included."""
        queues = (self.index, self._deferred, self.waiting, self.shares)
        return sum(queue.num_entries for queue in queues)

    def by_row(self, row: RowKey) -> Request | None:
        """Return the running or draining request that results for a row belong to; None if it has ended."""
        request = self.rows.slot_to_request.get(row.slot)
        if request is not None and request.slot_version == row.slot_version:
            return request
        return self.draining.get(row)

    @property
    def next_due_at(self) -> float:
        """When the next deadline passes, or a deferred request is tried again, in seconds of the clock."""
        deferred = self._deferred.peek()
        deferred_until = math.inf if deferred is None else deferred.deferred_until
        return min(self.index.next_deadline, deferred_until)

    def reads_cache(self, request: Request) -> bool:
        """Return whether a request may use cached blocks.

        The cache holds neither log-probabilities of prompts nor the states of their tokens. So a request that wants
        any of them but the last one's computes all of its prompt.
        """
        if request.awaits_prompt_logprobs or not self._reads_last_state_only(request.content.pooling):
            return False
        return self.blocks.is_cached(request.blocks)

    def cached_blocks(self, request: Request) -> Sequence[int]:
        """Return the blocks in the cache that hold the beginning of a waiting request, as the manager has them."""
        if not self.reads_cache(request):
            return []
        return self.blocks.get_computed_blocks(request.blocks, request.token_ids)

    def add(self, request: Request) -> None:
        """Let a new request wait for its admission."""
        self.index.add(request)
        self.shares.open(request)
        self.shares.settle(self.rows)
        self.waiting.add(request)

    def adopt(self, previous: RequestStates, limits: Sequence[AdmissionLimit]) -> None:
        """Take over all requests of an engine's previous worker, which all wait, with their tenants' shares.

        Args:
            previous: The states of the scheduler that planned for that worker.
            limits: The admission limits of this one.
        """
        assert not self.index, "requests cannot be mixed"
        assert len(previous.waiting) == len(previous.index), "something still runs there"
        self.index, self.shares, self.waiting = previous.index, previous.shares, previous.waiting
        self.waiting.replace_limits(limits)
        self.shared_prompts, self._deferred = previous.shared_prompts, previous._deferred

    def admit(self, request: Request, hits: Sequence[int], num_computed_tokens: int, count: int) -> NewRow:
        """Give a waiting request a row and blocks.

        Its tenant is charged for the whole prompt now, once in the request's life, so that the next comparison of
        tenants takes it into account. A request that moved here was charged where it came from.

        Args:
            request: The request.
            hits: Cached blocks that hold its beginning.
            num_computed_tokens: Tokens that need not be computed.
            count: Tokens after those that the step computes.
        """
        self.waiting.remove(request)
        if not request.is_returning:
            self.shares.charge(request, len(request.token_ids) - num_computed_tokens)
        if not request.was_admitted:
            request.own_tokens()
        table, num_tokens = request.blocks, num_computed_tokens + count
        allocated = self.blocks.allocate(table, num_tokens, hits)
        assert allocated is not None, "admitted without enough blocks"
        if request.kv_source is not None:
            self.transfers.pulls.note_admitted(request)
        self.blocks.cache_full_blocks([(table, request.token_ids, num_tokens)], is_planning=True)
        self.shared_prompts.note_planned(request, num_tokens)
        block_size = self.blocks.block_size
        self.rows.place(request, num_computed_tokens, -(-num_tokens // block_size) * block_size)
        emitted = request.token_ids[request.num_prompt_tokens :]
        emitted_token_ids = np.array(emitted, np.uint32) if emitted else empty_u32()
        block_ids = np.array(table.block_ids, np.uint32)
        emitted_token_ids.flags.writeable = block_ids.flags.writeable = False
        return NewRow(
            slot=request.slot,
            slot_version=request.slot_version,
            content=request.content,
            emitted_token_ids=emitted_token_ids,
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=max(num_computed_tokens, len(hits) * block_size),
            block_ids=block_ids,
            seed=request.seed,
            prompt_logprobs_start=request.prompt_logprobs_start,
            group_block_ids=self.blocks.further_ids(table),
        )

    def grow(self, slots: Slots, ends: Ints | None = None) -> Sequence[Growth]:
        """Give running rows more blocks. There must be enough free ones.

        Others may find what the rows have filled with known tokens from now on.

        Args:
            slots: [g] rows that grow.
            ends: [g] tokens that each must have blocks for. None: one more than their blocks hold, by the next token
                that they compute. Blocks must `grows_evenly`.
        """
        rows, block_size = self.rows, self.blocks.block_size
        requests = list(map(rows.slot_to_request.__getitem__, slots.tolist()))
        tables = [request.blocks for request in requests]
        if ends is None:
            requests = [each for each in requests if each.blocks.num_cached < len(each.blocks.block_ids)]
            growths = self.blocks.grow_by_one(tables)
            rows.capacity[slots] += block_size
            if not requests:  # all is cached, as while results come in time
                return growths
            slots = np.array([request.slot for request in requests])
            ends = rows.computed[slots] + 1
        else:
            growths = self.blocks.grow(tables, rows.capacity[slots], ends)
            rows.capacity[slots] = -(-ends // block_size) * block_size
        self._cache_full_blocks(requests, np.minimum(rows.known[slots], ends), is_planning=True)
        return growths

    def fill_blocks(self, slots: Slots) -> None:
        """Close the open blocks of rows that have filled them with known tokens.

        Others may find a block once a planned step computes all of it.
        """
        rows = self.rows
        requests = list(map(rows.slot_to_request.__getitem__, slots.tolist()))
        contents = rows.open_blocks.close_full(slots, requests)
        nums_filled = np.minimum(rows.known[slots], rows.computed[slots]).tolist()
        self.blocks.cache_closed_blocks(
            [
                (request.blocks, request.token_ids, filled, content)
                for request, filled, content in zip(requests, nums_filled, contents, strict=True)
            ]
        )

    def preempt(self, request: Request) -> None:
        """Take a running request's row and blocks. It starts over with all its tokens, those in flight included."""
        self._take_off(request)
        if request.num_in_flight:
            self.draining[request.slot, request.slot_version] = request
            self._wait(request, waits_for=WaitsFor.RESULTS)
        else:
            self._wait(request)

    def append_late(self, request: Request, token_ids: Sequence[int], num_expected: int) -> None:
        """Add the tokens of a step that was in flight when its request was preempted.

        Args:
            request: The request.
            token_ids: The tokens, one at least.
            num_expected: The most tokens that the step could bring.
        """
        request.token_ids.extend(token_ids)
        request.num_in_flight -= num_expected
        self.waiting.count_late_tokens(request, len(token_ids))
        self.shares.charge(request, num_output_tokens=len(token_ids))

    def finish_draining(self, request: Request) -> None:
        """Let a draining request be admitted. Results that are still in flight for it are dropped."""
        del self.draining[request.slot, request.slot_version]
        request.num_in_flight = 0
        self.waiting.release(request, WaitsFor.RESULTS)

    def requeue(self, request: Request) -> None:
        """Start a running request over from its known tokens, on a worker that may not have computed any of it.

        Tokens in flight are lost. They will be the same again, because sampling is keyed.
        """
        self.transfers.leases.drop(request)
        self._take_off(request, is_trusted=False)
        request.num_in_flight = 0
        self._wait(request)

    def defer(self, request: Request, now: float) -> None:
        """Take a started request off for which the worker is not ready, and try it again after a pause.

        The KV of its known tokens is valid. Tokens in flight are lost: the worker had none to continue from. Pauses
        grow, and begin anew for a request that has gone on since the last one.
        """
        if request.is_draining:
            self.finish_draining(request)
            self.waiting.hold(request, WaitsFor.FORM)
        else:
            self._take_off(request)
            request.num_in_flight = 0
            self._wait(request, waits_for=WaitsFor.FORM)
        if now - request.deferred_until > _LONGEST_PAUSE_S:
            request.num_deferrals = 0
        pause_s = min(_FIRST_PAUSE_S * 2**request.num_deferrals, _LONGEST_PAUSE_S)
        request.num_deferrals = min(request.num_deferrals + 1, _MAX_DOUBLINGS)
        request.deferred_until = now + pause_s
        self._deferred.push(request)

    def retry_deferred(self, now: float) -> None:
        """Let deferred requests be admitted after their pause."""
        while (request := self._deferred.peek()) is not None and request.deferred_until <= now:
            self._deferred.discard(request)
            self.waiting.release(request, WaitsFor.FORM)

    def end(self, request: Request, now: float, *, is_trusted: bool = True) -> None:
        """Remove a request, whatever its state.

        Args:
            request: The request.
            now: Seconds on the scheduler's clock.
            is_trusted: Whether its blocks hold what was planned, so that others may find them.
        """
        self.transfers.end(request, now, is_trusted=is_trusted)
        if request.state is RequestState.RUNNING:
            self._take_off(request, is_trusted=is_trusted)
        else:
            row = RowKey(request.slot, request.slot_version)
            if self.draining.get(row) is request:
                del self.draining[row]
            self.waiting.remove(request)
        self.shared_prompts.end(request)
        self.shares.close(request)
        self._deferred.discard(request)
        self.index.remove(request)
        request.state = RequestState.ENDED

    def check_integrity(self) -> None:
        """Check every request.

        Raises:
            AssertionError: Names the request and what is wrong.
        """
        self.rows.check_integrity()
        running = self.running
        tables = [request.blocks for request in running]
        self.blocks.check_integrity([*tables, *self.transfers.tables])
        self.shares.check_integrity(list(self.index))
        self.waiting.check_integrity()
        self.shared_prompts.check_integrity()
        self.index.check_integrity()
        assert len(running) + len(self.waiting) == len(self.index), "a request is lost"
        held = self.waiting.held_for(WaitsFor.FORM)
        assert held == set(self._deferred), "deferred requests are never tried again"
        draining = {request for request in self.index if request.is_draining}
        assert draining == set(self.draining.values()), "draining requests are lost, or not draining"
        for request in self.index:
            name = f"request {request.head.request_id}"
            if request.state is RequestState.RUNNING:
                assert self.rows.slot_to_request.get(request.slot) is request, f"{name} has no row"
                continue
            assert not request.blocks.block_ids, f"{name} holds blocks and does not run"
            assert request in self.waiting, f"{name} is {request.state} and not in the queue"
            if request.is_draining:
                row = request.slot, request.slot_version
                assert self.draining.get(row) is request, f"{name} does not get its results"

    def _take_off(self, request: Request, *, is_trusted: bool = True) -> None:
        """Empty a request's row and give back its blocks, with their content if it is trusted."""
        num_computed_tokens = int(self.rows.computed[request.slot])
        (num_tokens_to_charge,) = self.rows.take_tokens_to_charge(np.array([request.slot])).tolist()
        self.shares.charge(request, num_output_tokens=num_tokens_to_charge)
        self.rows.remove(request)
        if is_trusted:
            num_filled = min(num_computed_tokens, len(request.token_ids))
            self.blocks.cache_full_blocks([(request.blocks, request.token_ids, num_filled)])
        self.blocks.free(request.blocks)
        self.removed_slots.append(request.slot)

    def _cache_full_blocks(
        self, requests: Sequence[Request], nums_filled: Ints, *, is_planning: bool = False
    ) -> None:
        """Let others find the blocks that the first tokens of some requests fill.

        Args:
            nums_filled: [len(requests)] known tokens of each that are computed by the step planned last.
        """
        self.blocks.cache_full_blocks(
            [
                (request.blocks, request.token_ids, filled)
                for request, filled in zip(requests, nums_filled.tolist(), strict=True)
            ],
            is_planning=is_planning,
        )

    def _reads_last_state_only(self, pooling: PoolingParams | None) -> bool:
        if pooling is None:
            return True
        if pooling.kind is None:
            return pooling.task.label in self._last_state_tasks
        return pooling.kind is PoolingKind.LAST and pooling.task is not Task.TOKEN_EMBED

    def _wait(self, request: Request, *, waits_for: WaitsFor | None = None) -> None:
        request.state = RequestState.WAITING
        self.waiting.add(request, waits_for=waits_for)


def _by_deferral(request: Request) -> Key:
    return request.deferred_until, request.arrival
