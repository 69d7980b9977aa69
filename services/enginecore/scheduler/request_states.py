"""Where each request stands, and every way from one place to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from services.enginecore.kv import BlockManager
from services.enginecore.request import Request, RequestState
from services.enginecore.scheduler.fairness import FairShares
from services.enginecore.scheduler.running_rows import Ints, RunningRows, Slots
from services.enginecore.scheduler.waiting_queue import WaitingQueue
from triptych.types.step import NewRow, RowKey, empty_u32


class RequestStates:
    """Owned by the scheduler. Others decide who moves; here stands what a move entails.

    add -> waiting -- admit --> running -- end -->
              ^                    |
              |<---- requeue ------|
              |                    | preempt
              '----- parked <------'
            finish_draining    while its results are in flight
    """

    def __init__(
        self,
        *,
        rows: RunningRows,
        blocks: BlockManager,
        long_prompt_tokens: int | None = None,
    ) -> None:
        """Prompts of more than `long_prompt_tokens` may be passed over by shorter ones; None: none may."""
        self.rows = rows
        self.blocks = blocks
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.shares, long_prompt_tokens)
        self.draining: dict[tuple[int, int], Request] = {}
        """By the slot and generation that their results still come for."""
        self.removed_slots: list[int] = []
        """Rows that the worker holds and does not know to be gone: the next plan tells it."""
        self.is_short_of_blocks = False
        """Whether the blocks, and nothing else, kept somebody from running in the last step planned."""
        self._alive: dict[tuple[int, int], Request] = {}
        """By session and number."""
        self._id_to_num_alive: dict[tuple[int, str], int] = {}
        """Session and request_id -> choices that are alive."""
        self.num_content_bytes = 0
        """Of the prompts and sampling parameters of all requests; those of one request's choices count once."""

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._alive.values())

    @property
    def running(self) -> list[Request]:
        """A copy, in running order."""
        return list(self.rows.slot_to_request.values())

    @property
    def num_usable_rows(self) -> int:
        """Requests that can run at once: one for each row, or as many as run now while blocks are short."""
        return max(len(self.rows.slot_to_request), 1) if self.is_short_of_blocks else len(self.rows.known)

    def has_id(self, session: int, request_id: str) -> bool:
        return (session, request_id) in self._id_to_num_alive

    def num_alive_of(self, request: Request) -> int:
        """Return how many choices of this one's client request are alive."""
        return self._id_to_num_alive[request.session, request.request_id]

    def by_number(self, session: int, number: int) -> Request | None:
        return self._alive.get((session, number))

    def by_row(self, row: RowKey) -> Request | None:
        """Return the request that a row's results belong to, running or draining; None: no request that is alive."""
        request = self.rows.slot_to_request.get(row.slot)
        if request is not None and request.slot_version == row.slot_version:
            return request
        return self.draining.get(row)

    def reads_cache(self, request: Request) -> bool:
        """Logprobs of a prompt are not in the cache: who waits for them computes all of it."""
        return self.blocks.enable_prefix_caching and not request.awaits_prompt_logprobs

    def cached_blocks(self, request: Request) -> list[int]:
        """What the cache holds of a waiting request's beginning."""
        if not self.reads_cache(request):
            return []
        return self.blocks.get_computed_blocks(request.blocks, request.token_ids)

    def add(self, request: Request) -> None:
        self._alive[request.session, request.number] = request
        key = request.session, request.request_id
        if key not in self._id_to_num_alive:
            self._id_to_num_alive[key] = 0
            self.num_content_bytes += request.content.num_bytes
        self._id_to_num_alive[key] += 1
        self.shares.open(request)
        self.settle()
        self.waiting.add(request)

    def adopt(self, previous: RequestStates) -> None:
        """Take over all that wait in the roster of a worker that is gone, with their tenants' accounts."""
        assert not self._alive, "only an empty roster takes over another"
        assert len(previous.waiting) == len(previous), "something still runs there"
        self.shares, self.waiting = previous.shares, previous.waiting
        self._alive, self._id_to_num_alive = previous._alive, previous._id_to_num_alive
        self.num_content_bytes = previous.num_content_bytes

    def settle(self) -> None:
        """Bring the tenants' counters up to date, if there is anything to compare them with."""
        if self.shares.has_rivals:
            self.shares.settle(self.rows)

    def admit(self, request: Request, hits: Sequence[int], num_computed_tokens: int, count: int) -> NewRow:
        """Give a waiting request a row that computes `count` tokens at once, and blocks for them.

        Its tenant is charged for the whole prompt now, once in its life, so that the next choice knows of it.
        """
        self.waiting.remove(request)
        if not request.was_admitted:
            self.shares.charge(request, len(request.token_ids) - num_computed_tokens)
            request.own_tokens()
        table, num_tokens = request.blocks, num_computed_tokens + count
        allocated = self.blocks.allocate(table, num_tokens, hits)
        assert allocated is not None, "admitted without room"
        self.blocks.cache_full_blocks(table, request.token_ids, num_tokens)
        self.rows.place(request, num_computed_tokens)
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
            num_cached_tokens=max(num_computed_tokens, len(hits) * self.blocks.block_size),
            block_ids=block_ids,
            seed=request.seed,
            prompt_logprobs_start=request.prompt_logprobs_start,
        )

    def grow(self, slots: Slots, ends: Ints) -> tuple[list[int], list[int]]:
        """Give each running row the blocks that its first `ends` tokens need: [g], there must be as many.

        Returns the blocks, and the slots that they went to, in parallel. Others may now find what the
        rows have filled with known tokens.
        """
        rows, block_slots, block_ids = self.rows, [], []
        num_filled = np.minimum(rows.known[slots], ends)
        for slot, end, filled in zip(slots.tolist(), ends.tolist(), num_filled.tolist(), strict=True):
            request = rows.slot_to_request[slot]
            added = self.blocks.allocate(request.blocks, end)
            assert added is not None, "grown without room"
            self.blocks.cache_full_blocks(request.blocks, request.token_ids, filled)
            block_slots += [slot] * len(added)
            block_ids += added
        block_size = self.blocks.block_size
        rows.capacity[slots] = -(-ends // block_size) * block_size
        return block_slots, block_ids

    def fill_blocks(self, slots: Slots) -> None:
        """The open blocks of these rows are full of known tokens: others may find them once a planned step
        computes them whole."""
        rows = self.rows
        num_filled = np.minimum(rows.known[slots], rows.computed[slots])
        for slot, filled in zip(slots.tolist(), num_filled.tolist(), strict=True):
            request = rows.slot_to_request[slot]
            rows.close_block(request)
            self.blocks.cache_full_blocks(request.blocks, request.token_ids, filled)

    def preempt(self, request: Request) -> None:
        """Take a running request's row and blocks. It starts over with all its tokens, those in flight included, unless
        they end it."""
        self._take_off(request)
        if request.num_in_flight:
            request.state = RequestState.DRAINING
            self.draining[request.slot, request.slot_version] = request
        else:
            self._wait(request)

    def finish_draining(self, request: Request) -> None:
        """Let a parked request wait for admission; what is still in flight for it is nobody's."""
        del self.draining[request.slot, request.slot_version]
        self._wait(request)

    def append_late(self, request: Request, token_id: int) -> None:
        """A token that was in flight when its request was parked."""
        request.token_ids.append(token_id)
        request.num_in_flight -= 1
        self.shares.charge(request, num_output_tokens=1)

    def requeue(self, request: Request) -> None:
        """Start a running request over from its known tokens, on a worker that cannot be trusted to have
        computed anything of it. What is in flight is lost and will be the same again: sampling is keyed."""
        self._take_off(request, is_trusted=False)
        self._wait(request)

    def end(self, request: Request, *, is_trusted: bool = True) -> None:
        """A request leaves, wherever it stands. `is_trusted`: its blocks hold what was planned."""
        if request.state is RequestState.RUNNING:
            self._take_off(request, is_trusted=is_trusted)
        elif request.state is RequestState.DRAINING:
            del self.draining[request.slot, request.slot_version]
        else:
            self.waiting.remove(request)
        self.shares.close(request)
        del self._alive[request.session, request.number]
        key = request.session, request.request_id
        self._id_to_num_alive[key] -= 1
        if not self._id_to_num_alive[key]:
            del self._id_to_num_alive[key]
            self.num_content_bytes -= request.content.num_bytes
        request.state = RequestState.ENDED

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is off."""
        self.rows.check_integrity()
        running = self.running
        self.blocks.check_integrity(request.blocks for request in running)
        self.shares.check_integrity(list(self))
        self.waiting.check_integrity()
        num_alive = Counter((request.session, request.request_id) for request in self)
        assert num_alive == self._id_to_num_alive, "choices are counted wrongly"
        num_bytes = sum({(r.session, r.request_id): r.content.num_bytes for r in self}.values())
        assert num_bytes == self.num_content_bytes, f"{num_bytes} bytes, {self.num_content_bytes} are noted"
        assert len(running) + len(self.draining) + len(self.waiting) == len(self._alive), "a request is lost"
        for request in self:
            name = f"request {request.request_id}"
            if request.state is RequestState.RUNNING:
                assert self.rows.slot_to_request.get(request.slot) is request, f"{name} has no row"
                continue
            assert not request.blocks.block_ids, f"{name} holds blocks and does not run"
            if request.state is RequestState.DRAINING:
                assert self.draining.get((request.slot, request.slot_version)) is request, (
                    f"{name} is not parked"
                )
                assert request.num_in_flight > 0, f"{name} is parked for nothing"
            else:
                assert request in self.waiting, f"{name} is {request.state} and not in the queue"

    def _take_off(self, request: Request, *, is_trusted: bool = True) -> None:
        """Empty its row, and give back its blocks: with their content, if that is to be trusted."""
        num_computed_tokens = int(self.rows.computed[request.slot])
        (num_tokens_to_charge,) = self.rows.take_tokens_to_charge(np.array([request.slot])).tolist()
        self.shares.charge(request, num_output_tokens=num_tokens_to_charge)
        self.rows.remove(request)
        if is_trusted:
            num_filled = min(num_computed_tokens, len(request.token_ids))
            self.blocks.cache_full_blocks(request.blocks, request.token_ids, num_filled)
        self.blocks.free(request.blocks)
        self.removed_slots.append(request.slot)

    def _wait(self, request: Request) -> None:
        request.state = RequestState.WAITING
        request.num_in_flight = 0
        self.waiting.add(request)
