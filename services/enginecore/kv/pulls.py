"""Prompts that another engine computes: their blocks are reserved here, pulled, and held until they are used.

held, for blocks ──► pulling ──► complete: cached ──────────────────────────┬─► arrived ──► admitted, as after
                        └─────── failed, or late: what has come is cached, ─┘               any prefix hit
                                 and the rest is computed here
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.types.kv_transfer import KvPull, KvSource, PullProgress, TransferCounts
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.groups import Count
from triptych_services.enginecore.kv.holds import BlockHolds
from triptych_services.enginecore.kv.manager import BlockManager
from triptych_services.enginecore.request import Request

log = logging.getLogger(__name__)

MAX_PULLS = 16
"""Pulls at once. Each has a thread and a connection in the worker."""
_MAX_READY_S = 600.0
"""Most seconds that are waited on a frontend's word for a prompt to be computed elsewhere."""


@dataclass(slots=True, eq=False)
class _Pull:
    """The prompt of one request, until the request is admitted or ends."""

    request: Request
    source: KvSource
    added_at: float
    """Seconds on the scheduler's clock."""
    pull_id: int = 0
    """0: not begun, for lack of blocks."""
    table: BlockTable = field(default_factory=BlockTable)
    """The hits, then the blocks that are written. Once it has ended: the blocks that the request will find in the
    cache, or none if it has given way."""
    num_tokens: int = 0
    """Leading tokens of the prompt that are there once all parts have come."""
    num_parts: int = 0
    """Parts that are pulled."""
    num_pages: int = 0
    """Pages of states among them, the last ones."""
    num_arrived: int = 0
    """Parts that have come."""
    num_held_tokens: int = 0
    """Leading tokens of the prompt of which the blocks are held in the end."""
    has_ended: bool = False
    """Nothing more is pulled, and the request may be admitted."""

    @property
    def ready_at(self) -> float:
        """When its blocks are there if the frontend's word holds, in seconds of the scheduler's clock."""
        return self.added_at + min(max(self.source.ready_in_s, 0.0), _MAX_READY_S)

    @property
    def is_active(self) -> bool:
        return self.pull_id > 0 and not self.has_ended


class KvPulls:
    """Owned by `KvTransfers`.

    What has arrived stays held until its request is admitted: else whatever is pulled or decoded next would evict it.
    Running requests get it back if they need it, the last first.
    """

    def __init__(
        self,
        blocks: BlockManager,
        release: Callable[[Request], None],
        lease_s: float,
        counts: TransferCounts,
    ) -> None:
        """
        Args:
            counts: Counts of incoming transfers, advanced here.
            release: Lets a request be admitted.
            lease_s: Seconds that are waited where nothing is known of the time to compute a prompt here.
        """
        self._blocks = blocks
        self._moved = blocks.moved_prompts
        self._release = release
        self._lease_s = lease_s
        self._counts = counts
        self._pulls: dict[Request, _Pull] = {}
        """By arrival."""
        self._last_id = 0
        self.holds: BlockHolds[int, KvPull] = BlockHolds(blocks)
        """The blocks that are written, by pull id."""

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def arrived_tables(self) -> list[BlockTable]:
        """The blocks that have arrived for requests which wait to be admitted."""
        return [pull.table for pull in self._pulls.values() if pull.has_ended]

    @property
    def num_tokens(self) -> int:
        """Tokens of waiting prompts that are not computed here."""
        return sum(
            pull.num_held_tokens if pull.has_ended else pull.request.num_prompt_tokens
            for pull in self._pulls.values()
        )

    def add(self, request: Request, source: KvSource, now: float) -> bool:
        """Pull the blocks of a new request's prompt. Return False if the cache has all of them already."""
        num_tokens = self._moved.num_tokens(request.num_prompt_tokens)
        if len(self._beginning(request, num_tokens)) * self._blocks.block_size >= num_tokens:
            return False
        self._pulls[request] = _Pull(request, source, now)
        return True

    def begin(self, num_promised: Count) -> None:
        """Begin the pulls that there are enough free blocks for, in order of arrival.

        A prompt and its first token must fit beside everything that earlier prompts still need. Else prompts that have
        arrived would evict each other, or hold all blocks and none could be admitted.

        Args:
            num_promised: Free blocks that running requests are to get.
        """
        if not self._pulls:
            return
        blocks = self._blocks
        num_active = sum(pull.is_active for pull in self._pulls.values())
        num_promised += sum(self._num_lacking(pull) for pull in self._pulls.values() if pull.pull_id)
        for pull in list(self._pulls.values()):
            if pull.pull_id or pull.has_ended:
                continue
            request = pull.request
            num_tokens = self._moved.num_tokens(request.num_prompt_tokens)
            hits = self._beginning(request, num_tokens)
            if len(hits) * blocks.block_size >= num_tokens:
                self._end(pull)
                continue
            num_needed = request.num_prompt_tokens + 1
            if num_active >= MAX_PULLS or blocks.budget.num_lacking(num_needed, hits, num_promised) > 0:
                return
            self._begin(pull, hits, num_tokens)
            num_active += 1
            num_promised += self._num_lacking(pull)

    def note_progress(self, progress: PullProgress) -> None:
        """Take in how far a pull has come. One that has ended is no error."""
        pull = next((pull for pull in self._pulls.values() if pull.pull_id == progress.pull_id), None)
        if pull is None or pull.has_ended:
            return
        pull.num_arrived = 0 if progress.is_spoiled else min(progress.num_blocks, pull.num_parts)
        if progress.failure:
            self._give_up(pull, progress.failure)
        elif pull.num_arrived == pull.num_parts:
            self._counts.num_in_complete += 1
            self._end(pull)

    def expire(self, now: float, recompute_s: Callable[[int], float | None]) -> None:
        """Give up the pulls for which it is cheaper to compute the rest here than to wait any longer.

        Waiting is given up after as long as recomputing would take, so a failed pull costs at most twice the
        recomputation.

        Args:
            now: Seconds on the scheduler's clock.
            recompute_s: Number of prompt tokens to the seconds that computing them here takes; None: not known.
        """
        for pull in [pull for pull in self._pulls.values() if not pull.has_ended]:
            if now > pull.ready_at and now > self._given_up_at(pull, recompute_s):
                self._give_up(pull, f"late by {now - pull.ready_at:.2f} s")

    def next_due_at(self, recompute_s: Callable[[int], float | None]) -> float:
        """Return when `expire`, with the same argument, next gives a pull up; inf: never."""
        pulls = (pull for pull in self._pulls.values() if not pull.has_ended)
        return min((self._given_up_at(pull, recompute_s) for pull in pulls), default=math.inf)

    def give_way(self, request: Request | None = None) -> bool:
        """Give back the blocks of the latest prompt that has any, for those who need them more.

        Args:
            request: A waiting request that needs them; its own pull stays.

        Returns:
            Whether there was one.
        """
        for pull in reversed(list(self._pulls.values())):
            if not pull.table.block_ids or pull.request is request:
                continue
            if pull.has_ended:
                self._blocks.free(pull.table)
                pull.num_held_tokens = 0
            else:
                self._give_up(pull, "running requests need its blocks", holds_arrived=False)
            return True
        return False

    def note_admitted(self, request: Request) -> None:
        """Take in that a request has a row, and holds the blocks that have arrived for it."""
        if (pull := self._pulls.pop(request, None)) is not None:
            self._blocks.free(pull.table)

    def end(self, request: Request) -> None:
        """Take in that a request has ended."""
        pull = self._pulls.get(request)
        if pull is None:
            return
        if not pull.has_ended:
            self._end(pull)
        self.note_admitted(request)

    def forget(self) -> None:
        """Give back all blocks, and let all requests be admitted: the worker is gone."""
        self.holds.forget()
        for pull in self._pulls.values():
            if pull.has_ended:
                self._blocks.free(pull.table)
            else:
                self._counts.num_in_failed += 1
                self._release(pull.request)
        self._pulls.clear()

    def _given_up_at(self, pull: _Pull, recompute_s: Callable[[int], float | None]) -> float:
        """Return when a pull has been late for as long as computing the rest takes."""
        num_here = self._moved.num_usable(pull.table, pull.num_arrived)
        rest_s = recompute_s(pull.request.num_prompt_tokens - num_here)
        return pull.ready_at + (self._lease_s if rest_s is None else min(rest_s, self._lease_s))

    def _beginning(self, request: Request, num_tokens: int) -> Sequence[int]:
        """Return those cached blocks of a prompt that need not be pulled of its first `num_tokens` tokens."""
        hits = self._blocks.get_computed_blocks(request.blocks, request.token_ids)
        return self._moved.beginning(hits, num_tokens)

    def _num_lacking(self, pull: _Pull) -> Count:
        """Return how many more blocks a request needs for its prompt and its first token."""
        return self._blocks.budget.num_outstanding(pull.table, pull.request.num_prompt_tokens + 1)

    def _begin(self, pull: _Pull, hits: Sequence[int], num_tokens: int) -> None:
        """Hold blocks for the first tokens of a prompt, and have them pulled."""
        own = pull.request.blocks
        pull.table = BlockTable(own.root_hash, own.extras, hashes=own.hashes, shares_hashes=True)
        first, parts = self._moved.take(pull.table, num_tokens, hits)
        pull.num_tokens, pull.num_parts, pull.num_pages = num_tokens, len(parts.hashes), len(parts.pages)
        self._last_id += 1
        pull.pull_id = self._last_id
        order = KvPull(
            pull.pull_id,
            pull.source.endpoint.address,
            pull.source.lease,
            first,
            tuple(parts.block_ids),
            tuple(parts.hashes),
            tuple(parts.pages),
        )
        self.holds.begin(pull.pull_id, pull.table, order)

    def _give_up(self, pull: _Pull, why: str, *, holds_arrived: bool = True) -> None:
        """End a pull that is not complete, and say why: many of these are a network or a forecast to be seen to."""
        log.warning(
            "request %s computes its prompt itself behind %d pulled blocks: %s",
            pull.request.head.request_id,
            pull.num_arrived,
            why,
        )
        self._counts.num_in_failed += 1
        self._end(pull, holds_arrived=holds_arrived)

    def _end(self, pull: _Pull, *, holds_arrived: bool = True) -> None:
        """Cache what has arrived, and let the request be admitted.

        Args:
            holds_arrived: Whether the blocks that the request will find in the cache are held for it.
        """
        pull.has_ended = True
        request, arrived = pull.request, BlockTable()
        if pull.pull_id:
            table = pull.table
            is_whole = pull.num_arrived == pull.num_parts
            num_tokens = pull.num_tokens if is_whole else self._moved.num_usable(table, pull.num_arrived)
            self._moved.cache(table, num_tokens)
            self._counts.num_in_blocks += pull.num_arrived
            self._counts.num_in_pages += max(pull.num_arrived - pull.num_parts + pull.num_pages, 0)
            if pull.num_arrived:
                request.first_pulled_block = table.num_hits
        if holds_arrived:
            hits = self._blocks.get_computed_blocks(request.blocks, request.token_ids)
            self._moved.hold(arrived, hits)
            pull.num_held_tokens = len(hits) * self._blocks.block_size
        if pull.pull_id:
            self.holds.end(pull.pull_id)
        pull.table = arrived
        self._release(request)
