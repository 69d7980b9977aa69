"""KV transfers between the workers of one process in fake time. All that a worker offers arrives the moment it may."""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.grounds.fake_time import Process
from tests.helpers.kv_transfers import CarriedPulls, NaiveBlocks
from tests.helpers.scheduling import NaiveWorker
from triptych.types.kv_transfer import KvEndpoint, KvProgress
from triptych_services.worker.kv_transfer.exports import ExportTable
from triptych_services.worker.kv_transfer.session import KvTransferSession
from triptych_services.worker.step_orders import StepOrders


class MemoryTransfers:
    """The part of one worker's process in transfers; stands in for `KvTransferService`."""

    def __init__(
        self, process: Process, layout: str, worker: Callable[[], NaiveWorker], others: TransferNetwork
    ) -> None:
        """
        Args:
            layout: Workers of equal ones may transfer blocks.
            worker: Returns the one that has the process's blocks now.
        """
        self.process = process
        self.endpoint = KvEndpoint(f"{process.name}:2", layout, NaiveBlocks(worker).num_bytes(1))
        self.session: KvTransferSession | None = None
        self.pulls = CarriedPulls(others.exports_of, at_once=True)
        self._worker = worker
        others.add(self)

    def open_session(
        self, on_progress: Callable[[KvProgress], None], step_orders: StepOrders
    ) -> KvTransferSession:
        self.pulls.pulls.clear()
        self.session = KvTransferSession(NaiveBlocks(self._worker), self.pulls, on_progress, step_orders)
        return self.session


class TransferNetwork:
    """The workers of a ground, by name. Those of dead processes are replaced when they start again."""

    def __init__(self) -> None:
        self._members: dict[str, MemoryTransfers] = {}

    def add(self, member: MemoryTransfers) -> None:
        self._members[member.process.name] = member

    def exports_of(self, address: str) -> ExportTable | None:
        """Return what a worker offers; None if it is dead, stopped or without an engine."""
        member = self._members[address.partition(":")[0]]
        if member.process.is_dead or member.process.is_stopped or member.session is None:
            return None
        return member.session.exports

    def carry_all(self) -> None:
        """Bring whatever is offered to those who wait for it."""
        for member in self._members.values():
            if not (member.process.is_dead or member.process.is_stopped):
                with member.process.running():
                    member.pulls.carry_all()
