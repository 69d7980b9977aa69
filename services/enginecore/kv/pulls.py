"""Prompts that another engine computes: their blocks are reserved here, pulled, and found in the prefix cache then.

held, for blocks ──► pulling ──► complete: cached, and the request enters as after any prefix hit
                        └─────── failed, or late: what has arrived is cached, and the rest is computed here
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from services.enginecore.kv.block_table import BlockTable
from services.enginecore.kv.manager import BlockManager
from services.enginecore.request import Request
from triptych.types.kv_transfer import KvPull, KvSource, PullProgress

log = logging.getLogger(__name__)

MAX_PULLS = 16
"""Pulls at once. Each has a thread and a connection in the worker."""
_MAX_READY_S = 600.0
"""Most seconds that are waited on a frontend's word for a prompt to be computed elsewhere."""


@dataclass(slots=True, eq=False)
class _Pull:
    """The blocks of one prompt."""

    request: Request
    source: KvSource
    added_at: float
    """Seconds on the scheduler's clock."""
    table: BlockTable = field(default_factory=BlockTable)
    """The hits, then the blocks that are written. Empty until there are enough free blocks."""
    pull_id: int = 0
    """0: not begun."""
    num_arrived: int = 0


class KvPulls:
    """Owned by `KvTransfers`."""

    def __init__(self, blocks: BlockManager, release: Callable[[Request], None], lease_s: float) -> None:
        """
        Args:
            release: Lets a request be admitted.
            lease_s: Seconds that are waited where nothing is known of the time to compute a prompt here.
        """
        self._blocks = blocks
        self._release = release
        self._lease_s = lease_s
        self._pulls: dict[Request, _Pull] = {}
        """By arrival."""
        self._last_id = 0
        self.begun: list[KvPull] = []
        """Pulls that the worker has not been told of."""
        self.stopped: list[int] = []
        """Pulls whose end the worker has not been told."""
        self.num_pulled_blocks = 0
        """Blocks that have come from other workers since the start."""

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that are held."""
        return [pull.table for pull in self._pulls.values()]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts that others compute."""
        return sum(pull.request.num_prompt_tokens for pull in self._pulls.values())

    def add(self, request: Request, source: KvSource, now: float) -> bool:
        """Pull the blocks of a new request's prompt. Return False if the cache has all of them already."""
        num_full = request.num_prompt_tokens // self._blocks.block_size
        hits = self._blocks.get_computed_blocks(request.blocks, request.token_ids)
        if len(hits) >= num_full:
            return False
        self._pulls[request] = _Pull(request, source, now)
        return True

    def begin(self, num_promised: int) -> None:
        """Begin the pulls that there are enough free blocks for, in order of arrival.

        Args:
            num_promised: Free blocks that running requests are to get.
        """
        if not self._pulls:
            return
        num_active = sum(pull.pull_id > 0 for pull in self._pulls.values())
        for pull in list(self._pulls.values()):
            if pull.pull_id:
                continue
            request, blocks = pull.request, self._blocks
            num_full = request.num_prompt_tokens // blocks.block_size
            hits = blocks.get_computed_blocks(request.blocks, request.token_ids)[:num_full]
            if len(hits) == num_full:
                self._end(pull)
                continue
            num_tokens = num_full * blocks.block_size
            if num_active >= MAX_PULLS or blocks.num_lacking(num_tokens, hits, num_promised) > 0:
                return
            own = request.blocks
            pull.table = BlockTable(own.root_hash, own.extras, hashes=own.hashes, shares_hashes=True)
            added = blocks.allocate(pull.table, num_tokens, hits)
            assert added is not None, "reserved without enough blocks"
            self._last_id += 1
            num_active += 1
            pull.pull_id = self._last_id
            self.begun.append(
                KvPull(
                    pull.pull_id,
                    pull.source.endpoint.address,
                    pull.source.lease,
                    len(hits),
                    tuple(added[len(hits) :]),
                    tuple(own.hashes[len(hits) : num_full]),
                )
            )

    def note_progress(self, progress: PullProgress) -> None:
        """Take in how far a pull has come. One that has ended is no error."""
        pull = next((pull for pull in self._pulls.values() if pull.pull_id == progress.pull_id), None)
        if pull is None:
            return
        num_wanted = len(pull.table.block_ids) - pull.table.num_hits
        pull.num_arrived = 0 if progress.is_spoiled else min(progress.num_blocks, num_wanted)
        if progress.failure:
            self._give_up(pull, progress.failure)
        elif pull.num_arrived == num_wanted:
            self._end(pull)

    def expire(self, now: float, recompute_s: Callable[[int], float | None]) -> None:
        """Give up the pulls for which it is cheaper to compute the rest here than to wait any longer.

        A pull that is late by the time that computing the rest takes has cost as much again, and no more.

        Args:
            now: Seconds on the scheduler's clock.
            recompute_s: Returns the seconds to compute so many tokens of a prompt here; None: not known.
        """
        for pull in list(self._pulls.values()):
            due_at = pull.added_at + min(max(pull.source.ready_in_s, 0.0), _MAX_READY_S)
            if now <= due_at:
                continue
            num_here = (pull.table.num_hits + pull.num_arrived) * self._blocks.block_size
            rest_s = recompute_s(pull.request.num_prompt_tokens - num_here)
            if now > due_at + (self._lease_s if rest_s is None else min(rest_s, self._lease_s)):
                self._give_up(pull, f"late by {now - due_at:.2f} s")

    def give_way(self) -> bool:
        """Give up the latest pull that holds blocks, since running requests need some; False: there is none."""
        for pull in reversed(list(self._pulls.values())):
            if pull.pull_id:
                self._give_up(pull, "running requests need its blocks")
                return True
        return False

    def end(self, request: Request) -> None:
        """Take in that a request has ended."""
        pull = self._pulls.get(request)
        if pull is not None:
            self._end(pull)

    def forget(self) -> None:
        """Give back all blocks, and let all requests be admitted: the worker is gone."""
        for pull in self._pulls.values():
            self._blocks.free(pull.table)
            self._release(pull.request)
        self._pulls.clear()
        self.begun.clear()
        self.stopped.clear()

    def _give_up(self, pull: _Pull, why: str) -> None:
        """End a pull that is not complete, and say why: many of these are a network or a forecast to be seen to."""
        log.warning(
            "request %s computes its prompt itself behind %d pulled blocks: %s",
            pull.request.request_id,
            pull.num_arrived,
            why,
        )
        self._end(pull)

    def _end(self, pull: _Pull) -> None:
        """Cache what has arrived, give back the blocks, and let the request be admitted.

        The next step says so to the worker, before anything else is written to the blocks.
        """
        del self._pulls[pull.request]
        if pull.pull_id:
            self._blocks.cache_arrived(pull.table, pull.table.num_hits + pull.num_arrived)
            self.num_pulled_blocks += pull.num_arrived
            self._blocks.free(pull.table)
            is_ordered = all(begun.pull_id != pull.pull_id for begun in self.begun)
            if is_ordered:
                self.stopped.append(pull.pull_id)
            else:
                self.begun = [begun for begun in self.begun if begun.pull_id != pull.pull_id]
        self._release(pull.request)
