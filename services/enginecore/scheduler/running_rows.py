"""The counters of the running requests, as numpy columns with one entry per slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import U32
from triptych_services.enginecore.request import Request, RequestState

Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Flags = NDArray[np.bool_]

_FEW = 4  # watched ids that are compared one by one
_NO_TOKEN = 0xFFFFFFFF  # outside of every vocabulary; keeps the table of watched tokens from being empty


class RunningRows:
    """Columns of counters, one entry per slot of the worker. The scheduler owns them.

    A decode step reads and writes these columns and touches no `Request`.

    One request that decodes with two steps in flight (p = prompt, o = output, ? = placeholder):

        position   0  1  2  3  4  5  6  7  8  9
        token      p  p  p  p  o  o  ?  ?
                                     |     |  |
                           known = 6 ┘     |  └ last = 9, the position of the last token that it may have
                          num_expected = 8 ┘
        computed = 7: the steps sent so far compute the KV of every lower position

    A step may bring several tokens of a row, and how many it brings is known with its result only. Until then
    `num_expected` and `computed` are the most that there can be, and both are too high by at most `num_uncertain`:

        known <= num_expected - num_uncertain <= tokens, once all results are in <= num_expected

    Blocks are allocated up to `computed`, and cached up to `known`. The difference of the two counts is certain, so
    the next step can be planned before the results are in.

    A step computes min(num_expected, last) - computed of its tokens. The KV of the last token is never needed,
    so a request wants 0 tokens once all of its remaining output is in flight.

    A pooled row never samples. Its vectors are expected in the place of one token behind its prompt, which is never
    known: `num_expected` is one higher from the step that computes the end of its prompt on.
    """

    def __init__(
        self, max_num_seqs: int, block_size: int, eos_token_ids: Iterable[int], num_groups: int = 1
    ) -> None:
        self.computed: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] positions that have KV in blocks, or will have once the steps sent are done, at most."""
        self.known: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] tokens that the engine has seen."""
        self.num_expected: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] known tokens plus tokens in flight, at most."""
        self.num_uncertain: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] tokens in flight that may not come."""
        self.num_guesses: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] guesses that the worker had ready when the row was last sampled."""
        self.has_guesses = False
        """Whether any entry of `num_guesses` is above 0."""
        self.last: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] position of the last token that the request may have."""
        self.capacity: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] positions that its blocks hold, those of each group."""
        self.released: Ints = np.zeros((num_groups, max_num_seqs), np.int64)
        """[num_groups, max_num_seqs] leading blocks of each group that it has released or never held; one for twins."""
        self.snapshot_end: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] tokens of the prompt behind which the state is kept, and at which a step ends; 0: none is.
        Written at admission if the block manager has `snapshots`, and 0 if not."""
        self.slot_version: U32 = np.zeros(max_num_seqs, np.uint32)
        """[max_num_seqs] version of the row in the slot, or of the next row if the slot is empty."""
        self.session: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] frontend session of the request."""
        self.number: U32 = np.zeros(max_num_seqs, np.uint32)
        """[max_num_seqs] number of the request in its session."""
        self.tenant_index: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] index of the request's tenant in `FairShares`."""
        self.awaits_first_token: Flags = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs] whether the request has had no token yet; false for empty slots."""
        self.num_awaiting = 0
        """Rows that have had no token yet."""
        self.may_compute: Flags = np.ones(max_num_seqs, np.bool_)
        """[max_num_seqs] whether a step may compute tokens of the row. A held row keeps its blocks and wants 0 tokens.
        `hold` and `release` write it; it is true for empty slots."""
        self.open_block: U32 = np.zeros((max_num_seqs, block_size), np.uint32)
        """[max_num_seqs, block_size] tokens of each row's last, unfilled block, at position % block_size.
        The table stays small enough for the nearest cache, however long the sequences are."""
        self.slot_to_request: dict[int, Request] = {}
        """Running requests, in the order of their admission. A step plans them in this order."""
        self.detects_repetition: Flags = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs] whether each token of the row may end its request, by repeating a pattern."""
        self.is_pooled: Flags = np.zeros(max_num_seqs, np.bool_)
        """[max_num_seqs] whether the row becomes vectors, and samples nothing; false for empty slots."""
        self.num_pooled = 0
        """Rows that become vectors."""
        self.watched = WatchedTokens(eos_token_ids)
        """Token ids that may end one of the running requests."""
        self._block_size = block_size
        self._charged: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] known tokens that came with the row or that `take_tokens_to_charge` has returned."""
        self._num_held = self._num_detecting = 0
        """Rows that may not compute; rows that detect repetition."""
        self._free_slots = list(range(max_num_seqs))
        self._running_order: Slots | None = None
        self._ascending: Slots | None = None

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def running_order(self) -> Slots:
        """Return the [num_running] slots in the order of admission. Callers must not write to the array."""
        if self._running_order is None:
            slots = self.slot_to_request
            self._running_order = np.fromiter(slots, np.intp, len(slots))
        return self._running_order

    def ascending(self) -> Slots:
        """Return the [num_running] slots in their order. Callers must not write to the array."""
        if self._ascending is None:
            self._ascending = np.array(sorted(self.slot_to_request), np.intp)
        return self._ascending

    def place(self, request: Request, num_computed_tokens: int, capacity: int) -> None:
        """Give a request the lowest free slot. It must have its blocks and tokens already.

        Args:
            capacity: Positions that its blocks hold.
        """
        slot = heappop(self._free_slots)
        num_known = len(request.token_ids)
        self.computed[slot] = num_computed_tokens
        self.known[slot] = self.num_expected[slot] = self._charged[slot] = num_known
        self.num_uncertain[slot] = self.num_guesses[slot] = 0
        self.last[slot] = request.limit - 1
        self.capacity[slot] = capacity
        if request.blocks.groups:
            self.released[:, slot] = [group.num_released for group in request.blocks.groups]
        self.session[slot] = request.session
        self.number[slot] = request.number
        self.tenant_index[slot] = request.tenant_index
        self.awaits_first_token[slot] = request.first_token_at is None
        self.num_awaiting += request.first_token_at is None
        request.slot, request.slot_version = slot, int(self.slot_version[slot])
        request.state = RequestState.RUNNING
        self.slot_to_request[slot] = request
        self.watched.add(request.sampling.stop_token_ids)
        self.detects_repetition[slot] = request.sampling.repetition_detection is not None
        self._num_detecting += bool(self.detects_repetition[slot])
        self.is_pooled[slot] = request.is_pooled
        self.num_pooled += request.is_pooled
        self._running_order = self._ascending = None

    def remove(self, request: Request) -> None:
        """Bring a request's tokens up to date and empty its slot. Later results for the row match no row."""
        self.close_blocks([request])
        slot = request.slot
        request.num_in_flight = int(self.num_expected[slot] - self.known[slot])
        self.slot_version[slot] += 1
        del self.slot_to_request[slot]
        heappush(self._free_slots, slot)
        self.release(slot)
        self.watched.discard(request.sampling.stop_token_ids)
        self._num_detecting -= bool(self.detects_repetition[slot])
        self.detects_repetition[slot] = False
        self.num_pooled -= request.is_pooled
        self.is_pooled[slot] = False
        self.num_awaiting -= bool(self.awaits_first_token[slot])
        self.awaits_first_token[slot] = False
        self._running_order = self._ascending = None

    def hold(self, slot: int) -> None:
        """Keep a row from computing until `release`. Steps in flight are not affected."""
        self._num_held += bool(self.may_compute[slot])
        self.may_compute[slot] = False

    def release(self, slot: int) -> None:
        """Let a row compute again."""
        if self._num_held and not self.may_compute[slot]:
            self._num_held -= 1
            self.may_compute[slot] = True

    def wanted(self, slots: Slots) -> Ints:
        """Return how many tokens each row could compute now, [len(slots)]."""
        wanted = np.minimum(self.num_expected[slots], self.last[slots]) - self.computed[slots]
        return np.where(self.may_compute[slots], wanted, 0) if self._num_held else wanted

    def note_guesses(self, slots: Slots, counts: U32) -> None:
        """Note how many guesses the worker has ready for rows that it has sampled.

        Args:
            slots: [n]
            counts: [n] guesses of each; empty: none has any.
        """
        self.num_guesses[slots] = counts if len(counts) else 0
        self.has_guesses = bool(self.num_guesses.any())

    def expect(self, slots: Slots, guesses: Ints) -> None:
        """Count tokens that the step just planned may bring beyond the first of each row.

        Args:
            slots: [n]
            guesses: [n] further tokens of each, at most.
        """
        for column in (self.num_expected, self.computed, self.num_uncertain):
            column[slots] += guesses

    def settle(self, slots: Slots, num_limits: Ints, token_counts: Ints) -> None:
        """Take back the tokens that a step might have brought and has not.

        Args:
            slots: [n]
            num_limits: [n] the most tokens that the step could bring.
            token_counts: [n] the tokens that it has brought.
        """
        self.num_expected[slots] -= num_limits - token_counts
        self.computed[slots] -= num_limits - token_counts
        self.num_uncertain[slots] -= num_limits - 1

    def take_tokens_to_charge(self, slots: Slots) -> Ints:
        """Return how many tokens each row has put out since the last call, [len(slots)]."""
        known = self.known[slots]
        tokens_to_charge = known - self._charged[slots]
        self._charged[slots] = known
        return tokens_to_charge

    def take_first(self, slots: Slots) -> Slots:
        """Return which of these rows have had no token before, and note that they have one."""
        first = slots[self.awaits_first_token[slots]]
        self.awaits_first_token[first] = False
        self.num_awaiting -= len(first)
        return first

    def append(self, slots: Slots, token_ids: U32) -> tuple[Flags, Flags]:
        """Add one known token to each row.

        Returns:
            Whether the token filled the row's open block, [len(slots)], and whether it is the last token that the
            request may have, [len(slots)].
        """
        known = self.known[slots]
        offset = known % self._block_size
        self.open_block.reshape(-1)[slots * self._block_size + offset] = token_ids
        known += 1
        self.known[slots] = known
        return offset == self._block_size - 1, known > self.last[slots]

    def may_end(self, slots: Slots, token_ids: U32) -> Flags:
        """Return which of some new tokens may end their requests before the last token that these may have, [n].

        Args:
            slots: [n] row of each token.
        """
        may_end = self.watched.among(token_ids)
        return may_end | self.detects_repetition[slots] if self._num_detecting else may_end

    def last_tokens(self, request: Request, limit: int) -> U32:
        """Return the last known tokens of a running request, at most so many of its output."""
        slot, num_full = request.slot, len(request.token_ids)
        num_known = int(self.known[slot])
        start = max(request.num_prompt_tokens, num_known - limit)
        offset = num_full % self._block_size
        tail = self.open_block[slot, offset + max(start - num_full, 0) : offset + num_known - num_full]
        return np.concatenate((np.array(request.token_ids[start:], np.uint32), tail))

    def close_blocks(self, requests: Sequence[Request]) -> None:
        """Move the tokens of the rows' open blocks to their requests."""
        slots = [request.slot for request in requests]
        content, width = self.open_block[slots].tobytes(), self.open_block.itemsize * self._block_size
        begin = 0
        for request, known in zip(requests, self.known[slots].tolist(), strict=True):
            token_ids = request.token_ids
            start = len(token_ids)
            if known > start:
                first = begin + start % self._block_size * self.open_block.itemsize
                token_ids.frombytes(content[first : first + (known - start) * self.open_block.itemsize])
            begin += width

    def check_integrity(self) -> None:
        """Check every row.

        Raises:
            AssertionError: A counter is wrong; names the request and the values.
        """
        for slot, request in self.slot_to_request.items():
            name = f"request {request.head.request_id} in slot {slot}"
            known, num_expected = int(self.known[slot]), int(self.num_expected[slot])
            computed, capacity = int(self.computed[slot]), int(self.capacity[slot])
            assert request.state is RequestState.RUNNING, f"{name} is {request.state}"
            row = request.slot, request.slot_version
            assert row == (slot, self.slot_version[slot]), f"{name} believes to be in row {row}"
            assert computed < num_expected, f"{name}: computed {computed} of {num_expected} expected tokens"
            assert known <= num_expected <= self.last[slot] + 1, (
                f"{name}: known {known}, expected {num_expected}, last {self.last[slot]}"
            )
            assert computed <= capacity, f"{name}: computed {computed} of capacity {capacity}"
            uncertain = int(self.num_uncertain[slot])
            assert 0 <= uncertain <= num_expected - known, f"{name}: {uncertain} tokens are uncertain"
            if not request.blocks.groups:
                assert capacity == len(request.blocks.block_ids) * self._block_size, f"{name}: wrong capacity"
            for index, group in enumerate(request.blocks.groups):
                assert group.num_released == self.released[index, slot], (
                    f"{name}: group {index} has released more"
                )
            num_cached_tokens = request.blocks.num_cached * self._block_size
            assert num_cached_tokens <= min(known, computed + 1), (
                f"{name}: caches tokens that are not computed"
            )
            assert known - len(request.token_ids) < self._block_size, f"{name}: the open block overflows"
        pooled = {slot for slot, request in self.slot_to_request.items() if request.is_pooled}
        assert pooled == set(np.flatnonzero(self.is_pooled).tolist()), "the wrong rows are pooled"
        assert len(pooled) == self.num_pooled, "pooled rows are counted wrongly"
        held = set(np.flatnonzero(~self.may_compute).tolist())
        assert len(held) == self._num_held, "held rows are counted wrongly"
        in_use = set(self.slot_to_request)
        assert held <= in_use, "an empty slot is held"
        awaiting = set(self.awaits_first_token.nonzero()[0].tolist())
        assert len(awaiting) == self.num_awaiting, "rows without a token are counted wrongly"
        assert awaiting <= in_use, "an empty slot awaits a token"
        free = set(self._free_slots)
        assert len(free) == len(self._free_slots), "a slot is free twice"
        assert not in_use & free, "a slot is free and in use"
        assert len(in_use) + len(free) == len(self.known), "a slot is lost"


class WatchedTokens:
    """Every token id that may end some running request, so that one look finds the few tokens to check.

    It changes when requests with stop ids of their own come and go. A step costs a comparison per token and watched id
    while these are few, and one binary search per token where they are more.
    """

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._watchers = Counter(eos_token_ids)
        self._watchers[_NO_TOKEN] = 1
        self._sort()

    def __len__(self) -> int:
        """Return the number of different ids."""
        return len(self._watchers) - 1

    def add(self, token_ids: Iterable[int]) -> None:
        """Watch a request's own stop ids."""
        before = len(self._watchers)
        self._watchers.update(token_ids)
        if len(self._watchers) != before:
            self._sort()

    def discard(self, token_ids: Iterable[int]) -> None:
        """Stop watching ids for a request that ran with them."""
        before = len(self._watchers)
        for token_id in token_ids:
            self._watchers[token_id] -= 1
            if not self._watchers[token_id]:
                del self._watchers[token_id]
        if len(self._watchers) != before:
            self._sort()

    def among(self, token_ids: U32) -> Flags:
        """Return which of the tokens are watched, [len(token_ids)]."""
        if len(self._few):
            found = token_ids == self._few[0]
            for token_id in self._few[1:]:
                found |= token_ids == token_id
            return found
        places = self._sorted.searchsorted(token_ids)
        return self._sorted.take(places, mode="clip") == token_ids

    def _sort(self) -> None:
        self._sorted: U32 = np.sort(np.fromiter(self._watchers, np.uint32, len(self._watchers)))
        self._few = self._sorted if len(self._sorted) <= _FEW else self._sorted[:0]
