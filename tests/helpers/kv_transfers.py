"""Two schedulers with naive workers, and the transfers between them, one block at a time as a test says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.enginecore.request import Request
from tests.helpers.scheduling import BLOCK_SIZE, Engine
from triptych.types.kv_transfer import (
    KvEndpoint,
    KvExport,
    KvProgress,
    KvPull,
    KvSource,
    LeaseProgress,
    PullProgress,
)
from triptych.types.step import StepPlan

ENDPOINT = KvEndpoint("prefill:1", "layout", 1)


def lease_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def give_lease(request: Request, number: int) -> Request:
    request.kv_lease = lease_of(number)
    return request


def give_source(request: Request, number: int, ready_in_s: float = 0.0) -> Request:
    request.kv_source = KvSource(ENDPOINT, lease_of(number), ready_in_s)
    return request


@dataclass
class _Pull:
    order: KvPull
    num_blocks: int = 0
    failure: str = ""


@dataclass
class Transfers:
    """Carries out the orders of both engines, as their workers would."""

    prefill: Engine
    decode: Engine
    pulls: dict[int, _Pull] = field(default_factory=dict)
    offered: dict[bytes, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Lease -> its blocks and their hashes."""
    sent: dict[bytes, int] = field(default_factory=dict)
    exports: deque[tuple[KvExport, ...]] = field(default_factory=deque)
    """The exports of each step in flight of the engine that prefills."""

    def plan_prefill(self) -> StepPlan | None:
        plan = self.prefill.plan()
        if plan is not None:
            orders = plan.kv_orders
            for lease in orders.released if orders else ():
                self.offered.pop(lease, None)
                self.sent.pop(lease, None)
                self.exports = deque(
                    tuple(export for export in exports if export.lease != lease) for exports in self.exports
                )
            self.exports.append(orders.exports if orders else ())
        return plan

    def finish_prefill(self, **slots: list[int]) -> None:
        self.prefill.finish_step(**slots)
        for export in self.exports.popleft():
            blocks = self.offered.setdefault(export.lease, [])
            assert export.first_index == len(blocks), "blocks of a lease are exported in order"
            blocks += zip(export.block_ids, export.hashes, strict=True)

    def plan_decode(self) -> StepPlan | None:
        plan = self.decode.plan()
        if plan is not None and plan.kv_orders is not None:
            for pull_id in plan.kv_orders.stopped:
                self.pulls.pop(pull_id, None)
            for pull in plan.kv_orders.pulls:
                assert pull.pull_id not in self.pulls
                self.pulls[pull.pull_id] = _Pull(pull)
        return plan

    def carry_block(self, pull_id: int) -> bool:
        """Bring the next block of a pull, if it is offered."""
        pull = self.pulls[pull_id]
        order, place = pull.order, pull.num_blocks
        blocks = self.offered.get(order.lease, [])
        index = order.first_index + place
        if pull.failure or place == len(order.block_ids) or index >= len(blocks):
            return False
        source, block_hash = blocks[index]
        assert block_hash == order.hashes[place], "both engines name a block alike"
        for offset in range(BLOCK_SIZE):
            cell = self.prefill.worker.cells[source, offset]
            self.decode.worker.cells[order.block_ids[place], offset] = cell
        pull.num_blocks += 1
        self.sent[order.lease] = max(self.sent.get(order.lease, 0), index + 1)
        return True

    def report(self) -> None:
        """Tell both engines how far all transfers have come."""
        pulls = [PullProgress(name, pull.num_blocks, pull.failure) for name, pull in self.pulls.items()]
        leases = [LeaseProgress(lease, self.sent.get(lease, 0)) for lease in self.offered]
        for engine, progress in (
            (self.decode, KvProgress(pulls=tuple(pulls))),
            (self.prefill, KvProgress(leases=tuple(leases))),
        ):
            tell(engine, progress)

    def lose_prefill_worker(self) -> None:
        self.prefill.lose_worker()
        self.exports.clear()
        self.offered.clear()
        self.sent.clear()
        for pull in self.pulls.values():
            pull.failure = "lost"

    def lose_decode_worker(self) -> None:
        self.decode.lose_worker()
        self.pulls.clear()

    def turn(self) -> bool:
        """Do all that can be done now but carry blocks; return whether anything was."""
        is_busy = False
        for plan, finish, engine in (
            (self.plan_prefill, self.finish_prefill, self.prefill),
            (self.plan_decode, self.decode.finish_step, self.decode),
        ):
            while len(engine.plans) < engine.steps_in_flight and plan() is not None:
                is_busy = True
            if engine.plans:
                finish()
                is_busy = True
        return is_busy

    def result_of(self, number: int) -> tuple[list[int], object, int | None]:
        return self.decode.end_of(number)


def tell(engine: Engine, progress: KvProgress) -> None:
    """Tell an engine how far its worker's transfers have come."""
    scheduler = engine.scheduler
    scheduler.transfers.note_progress(progress, scheduler._clock())
    scheduler.check_integrity()
