"""The counters of the running requests, as numpy columns with one entry per slot."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import U32
from triptych_services.enginecore.request import Request, RequestState

Ints = NDArray[np.int64]
Slots = NDArray[np.intp]
Flags = NDArray[np.bool_]

_FEW = 4  # watched ids that are compared one by one
_ONE = np.array(1)  # numpy adds it in half of the time that a number of Python takes
_NO_TOKEN = 0xFFFFFFFF  # outside of every vocabulary; keeps the table of watched tokens from being empty


@dataclass(frozen=True, slots=True, eq=False)
class RunningSet:
    """The running rows between two changes of which rows run, in read-only columns by ascending slot."""

    index: Slots | slice
    """Their slots as an index of columns. Where they are the first slots it is a slice, which numpy does not copy."""
    slots: Slots
    """[n] their slots."""
    versions: U32
    """[n] version of each row."""
    sessions: Ints
    """[n] session of each request."""
    numbers: U32
    """[n] number of each request in its session."""
    places: Slots
    """[n] 0, 1, 2, ..."""
    ones: Ints
    """[n] 1 for each."""
    is_live: Flags
    """[n] true for each."""


class OpenBlocks:
    """The tokens of the last, unfilled block of each row. `RunningRows` owns it."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self.tokens: U32 = np.zeros((max_num_seqs, block_size), np.uint32)
        """[max_num_seqs, block_size] at position % block_size, the end of a prompt included. The table stays small
        enough for the nearest cache, however long the sequences are."""
        self._flat = self.tokens.reshape(-1)
        self._block_size = block_size
        self._offset: Ints = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] index of a row's next token in `_flat`, less its position."""
        self._last: Ints = np.arange(1, max_num_seqs + 1) * block_size - 1
        """[max_num_seqs] index of the last token of each row's block in `_flat`."""

    def begin(self, slot: int, token_ids: array[int]) -> None:
        """Put the last tokens of a request, which do not fill a block, into the block of its row."""
        num_known = len(token_ids)
        num_open = num_known % self._block_size
        self._offset[slot] = slot * self._block_size + num_open - num_known
        if num_open:
            self.tokens[slot, :num_open] = token_ids[-num_open:]

    def append(self, index: Slots | slice, positions: Ints, token_ids: U32) -> Flags:
        """Add the token at its position to each row, and return which rows have full blocks, [n]. Close these next."""
        places = positions + self._offset[index]
        self._flat[places] = token_ids
        return places == self._last[index]

    def close_full(self, slots: Slots, requests: Sequence[Request]) -> list[bytes]:
        """Move the tokens of blocks that are full to their requests.

        Returns:
            The tokens of each block, those of a prompt included.
        """
        self._offset[slots] -= self._block_size
        content, itemsize = self.tokens[slots].tobytes(), self.tokens.itemsize
        width = itemsize * self._block_size
        contents = [content[begin : begin + width] for begin in range(0, len(content), width)]
        for request, block in zip(requests, contents, strict=True):
            token_ids = request.token_ids
            num_closed = len(token_ids) % self._block_size  # of a prompt that ended within the block
            token_ids.frombytes(block[num_closed * itemsize :] if num_closed else block)
        return contents

    def close(self, slot: int, token_ids: array[int], num_known: int) -> None:
        """Add to a request's tokens those known ones that only the block of its row has."""
        num_closed = len(token_ids)
        start = num_closed % self._block_size
        token_ids.frombytes(self.tokens[slot, start : start + num_known - num_closed].tobytes())

    def check_integrity(self, slot: int, token_ids: array[int], num_known: int) -> None:
        """Check the block of a row.

        Args:
            token_ids: Tokens that its request has; further known ones are in the block only.
        """
        place = slot * self._block_size + num_known % self._block_size
        assert self._offset[slot] == place - num_known, f"slot {slot}: the next token goes to a wrong place"
        if num_open := len(token_ids) % self._block_size:
            same = self.tokens[slot, :num_open].tolist() == token_ids[-num_open:].tolist()
            assert same, f"slot {slot}: the open block begins with other tokens"


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
        self.open_blocks = OpenBlocks(max_num_seqs, block_size)
        """The last, unfilled block of each row."""
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
        self._running: RunningSet | None = None

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def running_order(self) -> Slots:
        """Return the [num_running] slots in the order of admission. Callers must not write to the array."""
        if self._running_order is None:
            slots = self.slot_to_request
            self._running_order = np.fromiter(slots, np.intp, len(slots))
        return self._running_order

    def running(self) -> RunningSet:
        """Return the rows that run, the same object until a row comes or goes."""
        if self._running is None:
            slots = np.sort(self.running_order())
            count = len(slots)
            is_first = count > 0 and slots[-1] == count - 1
            columns = slots, self.slot_version[slots], self.session[slots], self.number[slots]
            constants = np.arange(count), np.ones(count, np.int64), np.ones(count, np.bool_)
            for column in (*columns, *constants):
                column.flags.writeable = False
            self._running = RunningSet(slice(0, count) if is_first else slots, *columns, *constants)
        return self._running

    def running_of(self, slots: Slots) -> RunningSet | None:
        """Return the running rows if these are their slots, by the array itself. None: a row has come or gone since."""
        running = self._running
        return running if running is not None and running.slots is slots else None

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
        self.open_blocks.begin(slot, request.token_ids)
        self.watched.add(request.sampling.stop_token_ids)
        self.detects_repetition[slot] = request.sampling.repetition_detection is not None
        self._num_detecting += bool(self.detects_repetition[slot])
        self.is_pooled[slot] = request.is_pooled
        self.num_pooled += request.is_pooled
        self._running_order = self._running = None

    def remove(self, request: Request) -> None:
        """Bring a request's tokens up to date and empty its slot. Later results for the row match no row."""
        slot, num_known = request.slot, int(self.known[request.slot])
        self.open_blocks.close(slot, request.token_ids, num_known)
        request.num_in_flight = int(self.num_expected[slot]) - num_known
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
        self._running_order = self._running = None

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

    def decoding(self) -> Ints | None:
        """Return how many tokens each row computes if none can compute more than one, [num_running] in running order.

        It is `RunningSet.ones` itself if each can compute one. None: a row may be able to compute several, or is held.
        """
        running = self.running()
        num_expected = self.num_expected[running.index]
        is_next = num_expected == self.computed[running.index] + _ONE
        if self._num_held or np.count_nonzero(is_next) < len(is_next):
            return None
        if np.count_nonzero(num_expected <= self.last[running.index]) == len(is_next):
            return running.ones
        slots = self.running_order()  # the rest of some is in flight
        return (self.num_expected[slots] <= self.last[slots]).astype(np.int64)

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

    def append(self, slots: Slots, token_ids: U32) -> tuple[Slots, Slots]:
        """Add one known token to each row.

        Returns:
            The slots of the rows that have filled their open block by it, and the places in `slots` of the tokens that
            may end their requests.
        """
        running = self._running
        index = running.index if running is not None and running.slots is slots else slots
        known = self.known[index]
        is_filled = self.open_blocks.append(index, known, token_ids)
        self.known[index] = known = known + _ONE
        may_end = self.watched.among(token_ids)
        may_end |= known > self.last[index]
        if self._num_detecting:
            may_end |= self.detects_repetition[index]
        return slots[is_filled], may_end.nonzero()[0]

    def last_tokens(self, request: Request, limit: int) -> U32:
        """Return the last known tokens of a running request, at most so many of its output."""
        slot, num_full = request.slot, len(request.token_ids)
        num_known = int(self.known[slot])
        start = max(request.num_prompt_tokens, num_known - limit)
        offset = num_full % self._block_size
        tail = self.open_blocks.tokens[
            slot, offset + max(start - num_full, 0) : offset + num_known - num_full
        ]
        return np.concatenate((np.array(request.token_ids[start:], np.uint32), tail))

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
            self.open_blocks.check_integrity(slot, request.token_ids, known)
        pooled = {slot for slot, request in self.slot_to_request.items() if request.is_pooled}
        assert pooled == set(np.flatnonzero(self.is_pooled).tolist()), "the wrong rows are pooled"
        assert len(pooled) == self.num_pooled, "pooled rows are counted wrongly"
        held = set(np.flatnonzero(~self.may_compute).tolist())
        assert len(held) == self._num_held, "held rows are counted wrongly"
        in_use = set(self.slot_to_request)
        if self._running is not None:
            assert self._running.slots.tolist() == sorted(in_use), "the wrong rows are said to run"
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
        if self._few:
            found: Flags = token_ids == self._few[0]
            for token_id in self._few[1:]:
                found |= token_ids == token_id
            return found
        places = self._sorted.searchsorted(token_ids)
        return self._sorted.take(places, mode="clip") == token_ids

    def _sort(self) -> None:
        self._sorted: U32 = np.sort(np.fromiter(self._watchers, np.uint32, len(self._watchers)))
        own = self._sorted[:-1]  # without the id that no token has
        self._few = [np.array(token_id) for token_id in own] if len(own) <= _FEW else []
