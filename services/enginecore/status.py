"""An engine's counters, joined from what its parts know."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

from triptych.types.facts import EngineStatus, KvShape
from triptych_services.enginecore.scheduler.scheduler import Scheduler


def with_scheduler(status: EngineStatus, scheduler: Scheduler, kv: KvShape, *, now: float) -> EngineStatus:
    """Return a status with the counters of a scheduler and of its worker's KV cache. `now`: on the engine's clock."""
    snapshot = scheduler.snapshot()
    oldest_at = min((request.queued_at for request in snapshot.waiting), default=now)
    return replace(
        status,
        num_running=len(snapshot.running),
        num_waiting=len(snapshot.waiting),
        oldest_waiting_s=max(now - oldest_at, 0.0),
        num_blocks=snapshot.num_blocks,
        num_used_blocks=snapshot.num_used_blocks,
        num_cached_blocks=snapshot.num_cached_blocks,
        num_touched_blocks=snapshot.num_touched_blocks,
        soft_num_blocks=kv.soft_num_blocks,
        block_bytes=kv.block_bytes,
        block_size=kv.block_size,
        num_waiting_by_priority=Counter(request.priority for request in snapshot.waiting),
        kv_transfers=replace(scheduler.transfers.counts),
        **asdict(snapshot.counters),
    )
