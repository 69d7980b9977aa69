"""Two schedulers with naive workers, and the transfers between them: by hand, a block at a time, or at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.helpers.scheduling import Engine, NaiveWorker
from triptych.types.kv_transfer import KvEndpoint, KvProgress, KvSource
from triptych.types.step import StepPlan, StepResult
from triptych_services.enginecore.request import Request
from triptych_services.worker.kv_transfer.base import PullSink
from triptych_services.worker.kv_transfer.exports import ExportTable, LeaseGone
from triptych_services.worker.kv_transfer.session import KvTransferSession
from triptych_services.worker.step_orders import StepOrders

ENDPOINT = KvEndpoint("prefill:1", "layout", 1)
_NEVER_WRITTEN = -1  # as the naive worker's garbage, which no prefix has


def lease_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def give_lease(request: Request, number: int) -> Request:
    request.kv_lease = lease_of(number)
    return request


def give_source(request: Request, number: int, ready_in_s: float = 0.0) -> Request:
    request.kv_source = KvSource(ENDPOINT, lease_of(number), ready_in_s)
    return request


class NaiveBlocks:
    """A `BlockStore`: the cells of a naive worker, two numbers per position, and its pages, of two numbers."""

    def __init__(self, worker: Callable[[], NaiveWorker]) -> None:
        """`worker`: returns the one that computes now."""
        self._worker = worker

    def num_bytes(self, block: int) -> int:
        return self._num_cells(block) * 16

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        worker, never = self._worker(), (0, _NEVER_WRITTEN)
        if block > 0:
            cells = [worker.cells.get((block, at), never) for at in range(self._num_cells(block))]
        else:
            cells = [worker.pages.get(-block, never)]
        buffer[:] = np.array(cells, np.int64).tobytes()[offset : offset + len(buffer)]

    def write(self, block: int, offset: int, content: memoryview) -> None:
        assert (offset, len(content)) == (0, self.num_bytes(block)), "blocks are carried whole here"
        worker = self._worker()
        for at, (group, cell) in enumerate(np.frombuffer(content, np.int64).reshape(-1, 2).tolist()):
            if block > 0:
                worker.cells[block, at] = group, cell
            else:
                worker.pages[-block] = group, cell

    def _num_cells(self, block: int) -> int:
        """Return the positions of the longest block, or 1: a page is one number."""
        return max(group.block_size for group in self._worker().groups) if block > 0 else 1


@dataclass
class Carried:
    """A pull that the worker has begun and not been told to stop."""

    sink: PullSink
    num_blocks: int = 0
    was_known: bool = False
    has_failed: bool = False


class CarriedPulls:
    """A `PullTransport` within this process. Blocks come when a test carries them, or as soon as they are offered."""

    def __init__(self, exports_of: Callable[[str], ExportTable | None], *, at_once: bool = False) -> None:
        """
        Args:
            exports_of: Returns what the worker of an address offers; None: it is gone.
            at_once: Whether all that is offered arrives the moment that a pull begins.
        """
        self._exports_of = exports_of
        self._at_once = at_once
        self.pulls: dict[int, Carried] = {}

    def begin(self, sink: PullSink) -> Callable[[], None]:
        pull_id = sink.pull.pull_id
        assert pull_id not in self.pulls, "a pull begins twice"
        self.pulls[pull_id] = Carried(sink)
        if self._at_once:
            self.carry_all()
        return lambda: self.pulls.pop(pull_id, None)

    def carry_all(self) -> None:
        """Bring all blocks that are offered."""
        for pull_id in list(self.pulls):
            while self.carry(pull_id):
                pass

    def carry(self, pull_id: int) -> bool:
        """Bring the next block of a pull, if it is offered."""
        pull = self.pulls[pull_id]
        order, place = pull.sink.pull, pull.num_blocks
        if pull.has_failed or place == len(order.hashes):
            return False
        exports = self._exports_of(order.address)
        if exports is None:
            self.fail(pull_id, "the worker is gone")
            return False
        index = order.first_index + place
        try:
            block_hash = exports.wait_for(order.lease, index, 0.0, was_known=pull.was_known)
            pull.was_known = pull.was_known or exports.is_known(order.lease)
            if block_hash is None:
                return False
            assert block_hash == order.hashes[place], "both engines name a block alike"
            buffer = bytearray(exports.num_bytes(order.lease, index))
            exports.copy(order.lease, index, 0, memoryview(buffer))
        except LeaseGone as gone:
            self.fail(pull_id, str(gone), is_spoiled=gone.is_spoiled)
            return False
        pull.sink.write(place, 0, memoryview(buffer))
        pull.num_blocks += 1
        pull.sink.note_blocks(pull.num_blocks)
        exports.note_sent(order.lease, index + 1)
        return True

    def fail(self, pull_id: int, why: str, *, is_spoiled: bool = False) -> None:
        """Let a pull break, unless it is complete."""
        pull = self.pulls[pull_id]
        if not pull.has_failed and pull.num_blocks < len(pull.sink.pull.hashes):
            pull.has_failed = True
            pull.sink.fail(why, is_spoiled=is_spoiled)


class _Worker:
    """Carries out a session's orders beside its steps, which the naive worker computes."""

    def __init__(self, engine: Engine, transport: CarriedPulls) -> None:
        self.orders = StepOrders()
        self.orders.note_computed(0)
        self.session = KvTransferSession(
            NaiveBlocks(lambda: engine.worker),
            transport,
            lambda progress: tell(engine, progress),
            self.orders,
        )
        engine.on_result = self._on_result

    def _on_result(self, result: StepResult) -> None:
        self.session.note_errors(result)
        self.orders.note_computed(result.step_id)

    def close(self) -> None:
        self.orders.close()
        self.session.close()


class Transfers:
    """Two engines, and workers that carry out their orders as real ones do. Needs a running event loop."""

    def __init__(self, prefill: Engine, decode: Engine, *, at_once: bool = False) -> None:
        """`at_once`: whether blocks arrive as soon as both workers allow it; else a test carries them."""
        self.prefill, self.decode = prefill, decode
        self._at_once = at_once
        self._transport = CarriedPulls(lambda address: self._prefill_worker.session.exports, at_once=at_once)
        self._prefill_worker = _Worker(prefill, CarriedPulls(lambda address: None))
        self._decode_worker = _Worker(decode, self._transport)

    @property
    def pulls(self) -> dict[int, Carried]:
        """The pulls that have begun and have not been stopped."""
        return self._transport.pulls

    def num_offered(self, number: int) -> int:
        """Return how many blocks of a lease are offered."""
        exports, count = self._prefill_worker.session.exports, 0
        while exports.wait_for(lease_of(number), count, 0.0, was_known=False) is not None:
            count += 1
        return count

    def plan_prefill(self) -> StepPlan | None:
        return self._plan(self.prefill, self._prefill_worker)

    def plan_decode(self) -> StepPlan | None:
        return self._plan(self.decode, self._decode_worker)

    def _plan(self, engine: Engine, worker: _Worker) -> StepPlan | None:
        plan = engine.plan()
        if plan is not None:
            worker.session.begin_step(plan)
        return plan

    def finish_prefill(self, **slots: list[int]) -> None:
        self.prefill.finish_step(**slots)
        if self._at_once:
            self._transport.carry_all()

    def carry_block(self, pull_id: int) -> bool:
        """Bring the next block of a pull, if it is offered."""
        return self._transport.carry(pull_id)

    def fail_pull(self, pull_id: int, why: str, *, is_spoiled: bool = False) -> None:
        self._transport.fail(pull_id, why, is_spoiled=is_spoiled)

    def report(self) -> None:
        """Tell both engines how far all transfers have come."""
        self._decode_worker.session.report()
        self._prefill_worker.session.report()

    def lose_prefill_worker(self) -> None:
        self._prefill_worker.close()
        self.prefill.lose_worker()
        self._prefill_worker = _Worker(self.prefill, CarriedPulls(lambda address: None))
        for pull_id in self.pulls:
            self.fail_pull(pull_id, "lost")

    def lose_decode_worker(self) -> None:
        self._decode_worker.close()
        self.decode.lose_worker()
        self._decode_worker = _Worker(self.decode, self._transport)

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
