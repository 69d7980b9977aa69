"""The scheduler's part of moving KV blocks to other workers and from them (docs/adr/0035)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from triptych.config import EngineConfig
from triptych.errors import ConfigError
from triptych.types.kv_transfer import KvEndpoint, KvOrders, KvProgress, TransferCounts
from triptych.types.submit import SubmitRequest
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.leases import KvLeases
from triptych_services.enginecore.kv.manager import BlockManager
from triptych_services.enginecore.kv.pulls import KvPulls
from triptych_services.enginecore.request import Request

LEASE_S = 10.0


class KvTransfers:
    """The leases of prompts that are computed here for others, and the pulls of prompts that others compute.

    Owned by `RequestStates`. What changes is ordered by the next step, which may hold nothing else.
    """

    def __init__(
        self, blocks: BlockManager, release: Callable[[Request], None], lease_s: float = LEASE_S
    ) -> None:
        """
        Args:
            release: Lets a request be admitted that waited for its blocks.
            lease_s: Seconds for which blocks are held that are not pulled.
        """
        self.counts = TransferCounts()
        self.leases = KvLeases(blocks, lease_s, self.counts)
        self.pulls = KvPulls(blocks, release, lease_s, self.counts)

    def __len__(self) -> int:
        """Return how many leases and pulls there are."""
        return len(self.leases) + len(self.pulls)

    @property
    def has_orders(self) -> bool:
        """Whether the worker is to be sent something, if only by a step that computes nothing."""
        return self.leases.holds.has_orders or self.pulls.holds.has_orders

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that are held beside those of requests."""
        return [*self.leases.holds.tables, *self.pulls.holds.tables, *self.pulls.arrived_tables]

    def take_orders(self, computed: NDArray[np.int64]) -> KvOrders | None:
        """Return what a step that is planned now says to the worker; None: nothing.

        Args:
            computed: [max_num_seqs] computed count of each slot, this step included.
        """
        exports = self.leases.exports(computed)
        if not exports and not self.has_orders:
            return None
        return KvOrders(
            tuple(exports),
            self.leases.holds.take_ended(),
            self.pulls.holds.take_begun(),
            self.pulls.holds.take_ended(),
        )

    def end(self, request: Request, now: float, *, is_trusted: bool) -> None:
        """Take in that a request has ended."""
        if request.kv_lease:
            self.leases.end(request, now, is_trusted=is_trusted)
        if request.kv_source is not None:
            self.pulls.end(request)

    def note_progress(self, progress: KvProgress, now: float) -> None:
        """Take in how far the worker's transfers have come."""
        for pull in progress.pulls:
            self.pulls.note_progress(pull)
        for lease in progress.leases:
            self.leases.note_progress(lease, now)

    def expire(self, now: float, recompute_s: Callable[[int], float | None]) -> None:
        """End leases that are not pulled and pulls that are late; see `KvPulls.expire`."""
        self.leases.expire(now)
        self.pulls.expire(now, recompute_s)

    def next_due_at(self, recompute_s: Callable[[int], float | None]) -> float:
        """Return when `expire` next ends something, in seconds of the clock; inf: never."""
        return min(self.leases.next_due_at, self.pulls.next_due_at(recompute_s))

    def forget(self) -> None:
        """Drop everything: the worker is gone."""
        self.leases.forget()
        self.pulls.forget()


def check_role(config: EngineConfig) -> None:
    """Check that an engine's role can work with its cache.

    Raises:
        ConfigError: It cannot; names both values.
    """
    if config.engine.role != "both" and not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"engine.role: {config.engine.role} moves blocks between prefix caches, and cache.enable_prefix_caching is "
            "off: turn that on, or set the role to both"
        )


def without_useless_transfers(submit: SubmitRequest, endpoint: KvEndpoint | None) -> SubmitRequest:
    """Return a submission without the transfers that this engine's worker can take no part in.

    Its prompt is computed here then, as any other.

    Args:
        endpoint: Of this engine's worker.
    """
    if not submit.kv_lease and submit.kv_source is None:
        return submit
    if endpoint is None:
        return replace(submit, kv_lease=b"", kv_source=None)
    source = submit.kv_source
    if source is not None and source.endpoint.layout != endpoint.layout:
        return replace(submit, kv_source=None)
    return submit
