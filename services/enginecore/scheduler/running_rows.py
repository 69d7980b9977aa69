"""The counters of the running requests: numpy columns, one entry per slot."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from services.enginecore.request import Request, RequestState
from triptych.types.step import U32

Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Flags = NDArray[np.bool_]


class RowColumns:
    """Owned by the scheduler. A decode step reads and writes these columns and touches no `Request`.

    One request that decodes with two steps in flight (p = prompt, o = output, ? = placeholder):

        position   0  1  2  3  4  5  6  7  8  9
        token      p  p  p  p  o  o  ?  ?
                                     |     |  |
                           known = 6 ┘     |  └ last = 9, where the last token that it may have stands
                               horizon = 8 ┘
        computed = 7: steps that are sent compute the KV of every position below

    A step computes min(horizon, last) - computed tokens of it. The last token's KV is never needed, so a
    request whose remaining output is all in flight wants 0.
    """

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self.computed: Ints = np.zeros(max_num_seqs, np.int64)
        """Positions whose KV stands in blocks, or will once the steps sent are done."""
        self.known: Ints = np.zeros(max_num_seqs, np.int64)
        """Tokens that the engine has seen."""
        self.num_expected: Ints = np.zeros(max_num_seqs, np.int64)
        """Those and the ones in flight."""
        self.last: Ints = np.zeros(max_num_seqs, np.int64)
        self.capacity: Ints = np.zeros(max_num_seqs, np.int64)
        """Positions that its blocks hold."""
        self.slot_version: U32 = np.zeros(max_num_seqs, np.uint32)
        """Of the row in the slot, or of the next one if it is empty."""
        self.session: Ints = np.zeros(max_num_seqs, np.int64)
        self.number: U32 = np.zeros(max_num_seqs, np.uint32)
        self.account: Ints = np.zeros(max_num_seqs, np.int64)
        """Of the request's tenant, in `FairShares`."""
        self.awaits_first_token: Flags = np.zeros(max_num_seqs, np.bool_)
        self.open_block: U32 = np.zeros((max_num_seqs, block_size), np.uint32)
        """[max_num_seqs, block_size] tokens of each row's last, unfilled block, at position % block_size;
        the table stays small enough for the nearest cache, whatever the length of the sequences."""
        self.slot_to_request: dict[int, Request] = {}
        """In running order: first admitted, first planned."""
        self._block_size = block_size
        self._charged: Ints = np.zeros(max_num_seqs, np.int64)
        """Known tokens that `take_tokens_to_charge` has told of, or that came with the row."""
        self._free_slots = list(range(max_num_seqs))
        self._running_order: Slots | None = None

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def running_order(self) -> Slots:
        """[num_running] slots, first admitted first. Not to be written to."""
        if self._running_order is None:
            slots = self.slot_to_request
            self._running_order = np.fromiter(slots, np.intp, len(slots))
        return self._running_order

    def place(self, request: Request, num_computed_tokens: int) -> None:
        """Give a request the lowest free slot; its blocks and tokens are in place."""
        slot = heappop(self._free_slots)
        num_known = len(request.token_ids)
        self.computed[slot] = num_computed_tokens
        self.known[slot] = self.num_expected[slot] = self._charged[slot] = num_known
        self.last[slot] = request.limit - 1
        self.capacity[slot] = len(request.blocks.block_ids) * self._block_size
        self.session[slot] = request.session
        self.number[slot] = request.number
        self.account[slot] = request.account
        self.awaits_first_token[slot] = request.first_token_at is None
        request.slot, request.slot_version = slot, int(self.slot_version[slot])
        request.state = RequestState.RUNNING
        self.slot_to_request[slot] = request
        self._running_order = None

    def remove(self, request: Request) -> None:
        """Bring a request's tokens up to date and empty its slot: results for it match no row any more."""
        self.close_block(request)
        slot = request.slot
        request.num_in_flight = int(self.num_expected[slot] - self.known[slot])
        self.slot_version[slot] += 1
        del self.slot_to_request[slot]
        heappush(self._free_slots, slot)
        self._running_order = None

    def wanted(self, slots: Slots) -> Ints:
        """[len(slots)] tokens that each could compute now."""
        return np.minimum(self.num_expected[slots], self.last[slots]) - self.computed[slots]

    def num_promised_blocks(self) -> int:
        """Blocks that the running rows still need for tokens that are known: those of prompts computed in chunks."""
        slots = self.running_order()
        lacking = np.maximum(self.known[slots] - self.capacity[slots], 0)
        return int((-(-lacking // self._block_size)).sum())

    def take_tokens_to_charge(self, slots: Slots) -> Ints:
        """[len(slots)] tokens that each has put out since this was last asked."""
        known = self.known[slots]
        tokens_to_charge = known - self._charged[slots]
        self._charged[slots] = known
        return tokens_to_charge

    def append(self, slots: Slots, token_ids: U32) -> tuple[Flags, Flags]:
        """One more known token for each slot: [len(slots)] whether it filled the open block, and whether it is
        the last that the request may have."""
        offset = self.known[slots] % self._block_size
        self.open_block[slots, offset] = token_ids
        known = self.known[slots] + 1
        self.known[slots] = known
        return offset == self._block_size - 1, known > self.last[slots]

    def close_block(self, request: Request) -> None:
        """Move the tokens of the open block to the request."""
        slot, start = request.slot, len(request.token_ids)
        count = int(self.known[slot]) - start
        if count:
            offset = start % self._block_size
            request.token_ids.frombytes(self.open_block[slot, offset : offset + count].tobytes())

    def check_integrity(self) -> None:
        """Raises AssertionError naming the request and what is off."""
        for slot, request in self.slot_to_request.items():
            name = f"request {request.request_id} in slot {slot}"
            known, num_expected = int(self.known[slot]), int(self.num_expected[slot])
            computed, capacity = int(self.computed[slot]), int(self.capacity[slot])
            assert request.state is RequestState.RUNNING, f"{name} is {request.state}"
            assert (request.slot, request.slot_version) == (slot, self.slot_version[slot]), (
                f"{name} is elsewhere"
            )
            assert computed < num_expected, f"{name}: computed {computed} has passed horizon {num_expected}"
            assert known <= num_expected <= self.last[slot] + 1, (
                f"{name}: {known}, {num_expected}, {self.last[slot]}"
            )
            assert computed <= capacity, f"{name}: computed {computed} of capacity {capacity}"
            assert capacity == len(request.blocks.block_ids) * self._block_size, f"{name}: wrong capacity"
            offered = request.blocks.num_cached * self._block_size
            assert offered <= min(known, computed + 1), f"{name}: offers unknown or uncomputed tokens"
            assert known - len(request.token_ids) < self._block_size, f"{name}: open block overflows"
        in_use = set(self.slot_to_request)
        free = set(self._free_slots)
        assert len(free) == len(self._free_slots), "a slot is free twice"
        assert not in_use & free, "a slot is free and in use"
        assert len(in_use) + len(free) == len(self.known), "a slot is lost"
