"""The blocks of this worker that others may pull now. Written on the event loop, read by the server's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.types.kv_transfer import KvExport, LeaseProgress
from triptych_services.worker.kv_transfer.base import BlockStore


@dataclass(slots=True, eq=False)
class _Export:
    """The blocks of one lease."""

    places: list[int] = field(default_factory=list)
    """As of `KvExport`."""
    hashes: list[bytes] = field(default_factory=list)
    num_sent: int = 0
    failure: str = ""
    """Why its blocks must not be used. Empty: they are good."""


class LeaseGone(Exception):
    """A lease is not served any more; the message says why."""

    def __init__(self, why: str, *, is_spoiled: bool = False) -> None:
        super().__init__(why)
        self.is_spoiled = is_spoiled


class ExportTable:
    """The leases of one engine's session.

    A block is copied under the lock, and a lease is withdrawn under it before a step may write to its blocks. So what
    is sent is what the lease had.
    """

    def __init__(self, store: BlockStore, on_sent: Callable[[], None]) -> None:
        """`on_sent`: called on a thread of the server after each block."""
        self._store = store
        self._on_sent = on_sent
        self._exports: dict[bytes, _Export] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def publish(self, export: KvExport) -> None:
        """Offer further blocks, which a step has computed."""
        with self._changed:
            table = self._exports.setdefault(export.lease, _Export())
            if export.first_index == len(table.places) and not table.failure:
                table.places += export.places
                table.hashes += export.hashes
                self._changed.notify_all()

    def spoil(self, lease: bytes, why: str) -> None:
        """Let a lease fail because the KV of its blocks is not valid."""
        with self._changed:
            self._exports.setdefault(lease, _Export()).failure = why
            self._changed.notify_all()

    def withdraw(self, lease: bytes) -> None:
        """Serve a lease no more. When this returns nothing reads its blocks."""
        with self._changed:
            self._exports.pop(lease, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Serve nothing more."""
        with self._changed:
            self._is_closed = True
            self._exports.clear()
            self._changed.notify_all()

    def progress(self) -> tuple[LeaseProgress, ...]:
        """Return how far each lease has been pulled."""
        with self._changed:
            return tuple(LeaseProgress(lease, export.num_sent) for lease, export in self._exports.items())

    def wait_for(self, lease: bytes, index: int, timeout_s: float, *, was_known: bool) -> bytes | None:
        """Return the hash of a block once it is offered; None if it is not within the time.

        Raises:
            LeaseGone: It will not be offered.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                export = self._find(lease, was_known=was_known)
                if export is not None:
                    was_known = True
                    if index < len(export.places):
                        return export.hashes[index]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def is_known(self, lease: bytes) -> bool:
        """Return whether any block of a lease has been offered."""
        with self._changed:
            return lease in self._exports

    def num_bytes(self, lease: bytes, index: int) -> int:
        """Return the bytes of an offered block. Raises as `copy`."""
        with self._changed:
            return self._store.num_bytes(self._offered(lease).places[index])

    def copy(self, lease: bytes, index: int, offset: int, buffer: memoryview) -> None:
        """Copy a part of an offered block.

        Raises:
            LeaseGone: It is not offered any more.
        """
        with self._changed:
            self._store.read(self._offered(lease).places[index], offset, buffer)

    def note_sent(self, lease: bytes, num_blocks: int) -> None:
        """Note that so many leading blocks have been sent."""
        with self._changed:
            if (export := self._exports.get(lease)) is not None:
                export.num_sent = max(export.num_sent, num_blocks)
        self._on_sent()

    def _offered(self, lease: bytes) -> _Export:
        export = self._find(lease, was_known=True)
        assert export is not None, "a known lease is here, or gone"
        return export

    def _find(self, lease: bytes, *, was_known: bool) -> _Export | None:
        export = self._exports.get(lease)
        if self._is_closed or (export is None and was_known):
            raise LeaseGone("the lease has ended")
        if export is not None and export.failure:
            raise LeaseGone(export.failure, is_spoiled=True)
        return export
