"""The transfers of one engine's session, as its steps order them. Lives on the worker's event loop.

order of step N     carried out
stop, release       when the step is received: it may write to the blocks
pull                when the result of step N-1 is there: until then earlier steps use the blocks
export              when the result of step N is there: then the blocks are computed
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from triptych.types.kv_transfer import KvOrders, KvProgress, KvPull, PullProgress
from triptych.types.row_key import RowKey
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.kv_transfer.base import BlockStore, PullStopped, PullTransport
from triptych_services.worker.kv_transfer.exports import ExportTable
from triptych_services.worker.step_orders import StepOrders

_REPORT_S = 0.005
"""Seconds between two reports of progress, but for ends, which are reported at once."""


class KvTransferSession:
    """Carries out the orders of a session's steps, and reports how far transfers have come.

    When `close` returns no block is written or read any more.
    """

    def __init__(
        self,
        store: BlockStore,
        transport: PullTransport,
        on_progress: Callable[[KvProgress], None],
        step_orders: StepOrders,
    ) -> None:
        """
        Args:
            on_progress: Called on the event loop.
            step_orders: Orders of the same session, which wait for its steps.
        """
        self._store = store
        self._transport = transport
        self._step_orders = step_orders
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self.exports = ExportTable(store, self._note_change)
        self._pulls: dict[int, _Pull] = {}
        self._row_to_lease: dict[RowKey, bytes] = {}
        self._is_report_due = False
        self._is_closed = False

    def begin_step(self, plan: StepPlan) -> None:
        """Take the orders of a step that was received and cannot be computed yet."""
        orders = plan.kv_orders
        if orders is None:
            return
        self._end_transfers(orders)
        for order in orders.pulls:
            self._pulls[order.pull_id] = pull = _Pull(order, self._store, self._note_change)
            self._step_orders.after(plan.step_id - 1, order.pull_id, partial(self._begin_pull, pull))
        for export in orders.exports:
            self._row_to_lease[export.row] = export.lease
            self._step_orders.after(plan.step_id, export.lease, partial(self.exports.publish, export))

    def note_errors(self, result: StepResult) -> None:
        """Let the leases of rows with invalid KV fail, before the blocks of the step are offered."""
        for row, error in result.row_errors.items():
            lease = self._row_to_lease.get(row)
            if lease is not None and not error.kv_is_valid:
                self.exports.spoil(lease, f"the KV of its prompt is not valid: {error.message}")

    def report(self) -> None:
        """Report how far all transfers have come."""
        self._is_report_due = False
        if self._is_closed:
            return
        pulls = tuple(pull.progress for pull in self._pulls.values())
        leases = self.exports.progress()
        if pulls or leases:
            self._on_progress(KvProgress(pulls, leases))

    def close(self) -> None:
        """End all transfers."""
        self._is_closed = True
        self.exports.close()
        for pull in self._pulls.values():
            pull.stop()
        self._pulls.clear()

    def _begin_pull(self, pull: _Pull) -> None:
        pull.interrupt = self._transport.begin(pull)

    def _end_transfers(self, orders: KvOrders) -> None:
        for pull_id in orders.stopped:
            self._step_orders.cancel(pull_id)
            if (pull := self._pulls.pop(pull_id, None)) is not None:
                pull.stop()
        for lease in orders.released:
            self._step_orders.cancel(lease)
            self.exports.withdraw(lease)
        if orders.released:
            released = set(orders.released)
            self._row_to_lease = {
                row: lease for row, lease in self._row_to_lease.items() if lease not in released
            }

    def _note_change(self, *, is_end: bool = False) -> None:
        """Have a report made soon. Called on the threads of the transport."""
        with suppress(RuntimeError):  # the worker ends
            self._loop.call_soon_threadsafe(self._plan_report, is_end)

    def _plan_report(self, is_end: bool) -> None:
        if is_end:
            self.report()
        elif not self._is_report_due:
            self._is_report_due = True
            self._loop.call_later(_REPORT_S, self._report_if_due)

    def _report_if_due(self) -> None:
        if self._is_report_due:
            self.report()


class _Pull:
    """One pull, a `PullSink`. Its lock keeps a block from being written once the pull is stopped."""

    def __init__(self, pull: KvPull, store: BlockStore, on_change: Callable[..., None]) -> None:
        self.pull = pull
        self.progress = PullProgress(pull.pull_id, 0)
        """Replaced as a whole, so that any thread may read it."""
        self.interrupt: Callable[[], None] = lambda: None
        self._places = pull.places
        self._store = store
        self._on_change = on_change
        self._lock = threading.Lock()
        self._is_stopped = False

    def num_bytes(self, place: int) -> int:
        return self._store.num_bytes(self._places[place])

    def write(self, place: int, offset: int, content: memoryview) -> None:
        with self._lock:
            if self._is_stopped:
                raise PullStopped
            self._store.write(self._places[place], offset, content)

    def note_blocks(self, num_blocks: int) -> None:
        self.progress = PullProgress(self.pull.pull_id, num_blocks)
        self._on_change(is_end=num_blocks == len(self._places))

    def fail(self, why: str, *, is_spoiled: bool = False) -> None:
        self.progress = PullProgress(self.pull.pull_id, self.progress.num_blocks, why, is_spoiled)
        self._on_change(is_end=True)

    def stop(self) -> None:
        """End it. When this returns nothing writes to its blocks."""
        with self._lock:
            self._is_stopped = True
        self.interrupt()
