"""A priority queue whose members may leave from the middle, and sink while they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, int]
"""What sorts first, and then what settles most ties; of equals the first to come is first."""

_LEAST_DEAD = 64  # fewer dead entries than this cost less than sweeping them out


class LazyHeap(Generic[T]):
    """Smallest key first. A member's key may grow while it is in, never fall: an entry is a lower bound, and
    is looked at again only when it comes to the top. Who leaves out of turn is crossed out at once and swept
    out later; the dead never outnumber the living by more than a constant, whatever clients do."""

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._entries: list[tuple[Key, int, T]] = []
        self._ticks = count()  # so that members are never compared
        self._members: set[T] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: T) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        return iter(self._members)

    def push(self, member: T) -> None:
        assert member not in self._members, f"{member} queues twice"
        self._members.add(member)
        heappush(self._entries, (self._key(member), next(self._ticks), member))

    def peek(self) -> T | None:
        """The first; it stays."""
        entries = self._entries
        while entries:
            noted, tick, first = entries[0]
            if first not in self._members:
                heappop(entries)
                continue
            key = self._key(first)
            if key == noted:
                return first
            heapreplace(entries, (key, tick, first))
        return None

    def discard(self, member: T) -> None:
        """Take a member out, if it is in, wherever it stands. It may come again."""
        self._members.discard(member)
        if len(self._entries) > 2 * len(self._members) + _LEAST_DEAD:
            living = {member: tick for _, tick, member in self._entries if member in self._members}
            self._entries = [(self._key(member), tick, member) for member, tick in living.items()]
            heapify(self._entries)
