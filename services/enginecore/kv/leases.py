"""Blocks of prompts that other workers may pull, held until they have been, or for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.types.kv_transfer import KvExport, LeaseProgress, TransferCounts
from triptych.types.row_key import RowKey
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.holds import BlockHolds
from triptych_services.enginecore.kv.manager import BlockManager
from triptych_services.enginecore.kv.moved_prompts import Parts
from triptych_services.enginecore.request import Request, RequestState


@dataclass(slots=True, eq=False)
class _Lease:
    """The blocks of one prompt."""

    name: bytes
    request: Request
    table: BlockTable = field(default_factory=BlockTable)
    """Holds the parts of the prompt that are computed."""
    parts: Parts = field(default_factory=lambda: Parts([], [], []))
    """The same, in their order."""
    num_exported: int = 0
    num_pulled: int = 0
    expires_at: float | None = None
    """Seconds on the scheduler's clock; None while the request is alive."""


class KvLeases:
    """Owned by `KvTransfers`. A lease ends when all its blocks have been pulled, or none has been for a while."""

    def __init__(self, blocks: BlockManager, lease_s: float, counts: TransferCounts) -> None:
        """
        Args:
            lease_s: Seconds for which blocks are held after the prompt is computed and after each pull.
            counts: Counts of outgoing transfers, advanced here.
        """
        self._blocks = blocks
        self._lease_s = lease_s
        self._counts = counts
        self._leases: dict[bytes, _Lease] = {}
        self.holds: BlockHolds[bytes, None] = BlockHolds(blocks)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, request: Request) -> None:
        """Hold the blocks of a new request's prompt as they are computed."""
        if request.kv_lease not in self._leases:
            self._leases[request.kv_lease] = lease = _Lease(request.kv_lease, request)
            self.holds.begin(lease.name, lease.table)

    def exports(self, computed: NDArray[np.int64]) -> list[KvExport]:
        """Return the blocks that the steps planned so far fill, and hold them from now on. None comes twice.

        The last block of a prompt waits for the step that samples the first token: invalid KV is noticed there at the
        latest. So a pull is never complete before its blocks are known to be good.

        Args:
            computed: [max_num_seqs] computed count of each slot.
        """
        exports, moved = [], self._blocks.moved_prompts
        for lease in self._leases.values():
            request = lease.request
            if request.state is not RequestState.RUNNING:
                continue
            num_prompt, num_computed = request.num_prompt_tokens, int(computed[request.slot])
            lease.parts.append(moved.hold_computed(lease.table, request.blocks, num_prompt, num_computed))
            first, end = lease.num_exported, len(lease.parts.hashes)
            if num_computed < num_prompt and moved.holds_all(lease.table, num_prompt):
                end -= 1
            if first < end:
                row, new = RowKey(request.slot, request.slot_version), lease.parts.between(first, end)
                parts = tuple(new.block_ids), tuple(new.hashes), tuple(new.pages)
                exports.append(KvExport(lease.name, row, first, *parts))
                lease.num_exported = end
        return exports

    def end(self, request: Request, now: float, *, is_trusted: bool) -> None:
        """Take in that a request has ended. The lease stays if its prompt is computed, and can be trusted."""
        lease = self._leases.get(request.kv_lease)
        if lease is None or lease.request is not request:
            return
        is_whole = self._blocks.moved_prompts.holds_all(lease.table, request.num_prompt_tokens)
        if not is_trusted or not is_whole or lease.num_exported < len(lease.parts.hashes):
            self._release(lease)
        else:
            lease.expires_at = now + self._lease_s
            self._release_if_pulled(lease)

    def drop(self, request: Request) -> None:
        """Release the lease of a request that starts over, since what it had computed is not trusted."""
        lease = self._leases.get(request.kv_lease)
        if lease is not None and lease.request is request:
            self._release(lease)

    def note_progress(self, progress: LeaseProgress, now: float) -> None:
        """Take in how far the blocks of a lease have been pulled. One that has been released is no error."""
        lease = self._leases.get(progress.lease)
        if lease is None or progress.num_blocks <= lease.num_pulled:
            return
        self._counts.num_out_blocks += progress.num_blocks - lease.num_pulled
        self._counts.num_out_pages += len(lease.parts.between(lease.num_pulled, progress.num_blocks).pages)
        lease.num_pulled = progress.num_blocks
        if lease.expires_at is not None:
            lease.expires_at = now + self._lease_s
            self._release_if_pulled(lease)

    def expire(self, now: float) -> None:
        """Release the leases that have not been pulled for too long."""
        for lease in list(self._leases.values()):
            if lease.expires_at is not None and lease.expires_at <= now:
                self._counts.num_out_expired += 1
                self._release(lease)

    @property
    def next_due_at(self) -> float:
        """When the next lease expires, in seconds of the clock; inf: none does."""
        expiries = (lease.expires_at for lease in self._leases.values())
        return min((at for at in expiries if at is not None), default=math.inf)

    def forget(self) -> None:
        """Give back all blocks: their worker is gone."""
        self.holds.forget()
        self._leases.clear()

    def _release_if_pulled(self, lease: _Lease) -> None:
        if lease.num_pulled >= lease.num_exported:
            self._counts.num_out_complete += 1
            self._release(lease)

    def _release(self, lease: _Lease) -> None:
        del self._leases[lease.name]
        self.holds.end(lease.name)
