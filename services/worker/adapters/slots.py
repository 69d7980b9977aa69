"""The slots of the device that adapters are applied from, as rows take and leave them. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

NO_ADAPTER = -1
"""Slot of rows without an adapter."""


class AdapterUnavailable(Exception):
    """A row's adapter cannot be applied; the message says why."""


class AdapterSlots(Protocol):
    """The slots of the device, for the rows of a runner. Called on its thread, between steps."""

    def slot_of(self, digest: str) -> int:
        """Take a slot for a row, into which its adapter is put unless it is in one already.

        Raises:
            AdapterUnavailable: It is not loaded, or rows hold all slots with other adapters.
        """
        ...

    def release(self, slot: int) -> None:
        """Let go of what `slot_of` has returned for one row."""
        ...


class SlotTable:
    """The adapter in each slot. Those without rows stay until another one needs their slot, the oldest first."""

    def __init__(self, num_slots: int) -> None:
        self._digests: list[str] = [""] * num_slots
        self._num_rows = [0] * num_slots
        self._last_used = [0] * num_slots
        self._uses = 0

    def take(self, digest: str, put: Callable[[int], None]) -> int:
        """Return the slot of an adapter, with one row more.

        Args:
            put: Fills a slot with the adapter; called if it is in none.

        Raises:
            AdapterUnavailable: Rows hold all slots.
        """
        if digest in self._digests:
            slot = self._digests.index(digest)
        else:
            free = [slot for slot, num_rows in enumerate(self._num_rows) if num_rows == 0]
            if not free:
                raise AdapterUnavailable(
                    f"all {len(self._num_rows)} slots, worker.max_adapters, hold adapters of other rows"
                )
            slot = min(free, key=self._last_used.__getitem__)
            put(slot)
            self._digests[slot] = digest
        self._num_rows[slot] += 1
        self._uses += 1
        self._last_used[slot] = self._uses
        return slot

    def release(self, slot: int) -> None:
        """Count a row less."""
        assert self._num_rows[slot] > 0, "taken once for each row"
        self._num_rows[slot] -= 1

    def clear(self, slot: int) -> None:
        """Forget what is in a slot without rows."""
        assert self._num_rows[slot] == 0, "its rows read it"
        self._digests[slot] = ""
        self._last_used[slot] = 0

    def idle(self) -> list[tuple[int, str]]:
        """Return slot and digest of each adapter without rows."""
        return [
            (slot, digest)
            for slot, digest in enumerate(self._digests)
            if digest and self._num_rows[slot] == 0
        ]
