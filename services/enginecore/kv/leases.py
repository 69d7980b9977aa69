"""Blocks of prompts that other workers may pull, held until they have been, or for a while."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.enginecore.kv.block_table import BlockTable
from services.enginecore.kv.manager import BlockManager
from services.enginecore.request import Request, RequestState
from triptych.types.kv_transfer import KvExport, LeaseProgress
from triptych.types.row_key import RowKey


@dataclass(slots=True, eq=False)
class _Lease:
    """The blocks of one prompt."""

    name: bytes
    request: Request
    table: BlockTable = field(default_factory=BlockTable)
    """The blocks that are exported, which are held beside the request."""
    num_pulled: int = 0
    expires_at: float | None = None
    """Seconds on the scheduler's clock; None while the request is alive."""


class KvLeases:
    """Owned by `KvTransfers`. A lease ends when all its blocks have been pulled, or nobody has pulled for a while."""

    def __init__(self, blocks: BlockManager, lease_s: float) -> None:
        """`lease_s`: seconds for which blocks are held after the prompt is computed and after each pull."""
        self._blocks = blocks
        self._lease_s = lease_s
        self._leases: dict[bytes, _Lease] = {}
        self.released: list[bytes] = []
        """Leases whose end the worker has not been told."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that are held."""
        return [lease.table for lease in self._leases.values()]

    def add(self, request: Request) -> None:
        """Hold the blocks of a new request's prompt as they are computed."""
        self._leases.setdefault(request.kv_lease, _Lease(request.kv_lease, request))

    def exports(self, computed: NDArray[np.int64]) -> list[KvExport]:
        """Return the blocks that the steps planned so far fill, and hold them from now on. None comes twice.

        Args:
            computed: [max_num_seqs] computed count of each slot.
        """
        exports = []
        for lease in self._leases.values():
            request = lease.request
            if request.state is not RequestState.RUNNING:
                continue
            num_tokens = min(int(computed[request.slot]), request.num_prompt_tokens)
            first, end = len(lease.table.block_ids), num_tokens // self._blocks.block_size
            if first < end:
                ids = request.blocks.block_ids[first:end]
                self._blocks.hold(lease.table, ids)
                hashes = tuple(request.blocks.hashes[first:end])
                row = RowKey(request.slot, request.slot_version)
                exports.append(KvExport(lease.name, row, first, tuple(ids), hashes))
        return exports

    def end(self, request: Request, now: float, *, is_trusted: bool) -> None:
        """Take in that a request has ended. The lease stays if its prompt is computed, and can be trusted."""
        lease = self._leases.get(request.kv_lease)
        if lease is None or lease.request is not request:
            return
        num_full = request.num_prompt_tokens // self._blocks.block_size
        if not is_trusted or len(lease.table.block_ids) < num_full:
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
        lease.num_pulled = progress.num_blocks
        if lease.expires_at is not None:
            lease.expires_at = now + self._lease_s
            self._release_if_pulled(lease)

    def expire(self, now: float) -> None:
        """Release the leases that nobody has pulled for too long."""
        for lease in list(self._leases.values()):
            if lease.expires_at is not None and lease.expires_at <= now:
                self._release(lease)

    def forget(self) -> None:
        """Give back all blocks: their worker is gone."""
        for lease in self._leases.values():
            self._blocks.free(lease.table)
        self._leases.clear()
        self.released.clear()

    def _release_if_pulled(self, lease: _Lease) -> None:
        if lease.num_pulled >= len(lease.table.block_ids):
            self._release(lease)

    def _release(self, lease: _Lease) -> None:
        """Give back the blocks. The next step says so to the worker, before anything is written to them."""
        del self._leases[lease.name]
        self._blocks.free(lease.table)
        self.released.append(lease.name)
