"""A priority queue with members that may leave from the middle, and sink while they are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, ...]
"""Sort key, lowest first. Of equal keys the one pushed first goes first."""

_MIN_DEAD = 64  # fewer dead entries than this cost less than removing them


class LazyHeap(Generic[T]):
    """A queue with the smallest key first.

    A member's key may grow while it is in the queue, but not fall: an entry holds a lower bound of its key, which is
    compared again only when the entry comes to the top. A member must be discarded and pushed again when its key
    falls. Entries of members that left are removed later; there are never more of them than of members, by more than a
    constant.
    """

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
        """Iterate over the members in no particular order."""
        return iter(self._members)

    @property
    def num_entries(self) -> int:
        """Number of entries, those of members that left included."""
        return len(self._entries)

    def push(self, member: T) -> bool:
        """Add a member, and return whether its key is lower than that of every other entry."""
        assert member not in self._members, f"{member} is in the queue already"
        self._members.add(member)
        entries, key = self._entries, self._key(member)
        is_first = not entries or key < entries[0][0]
        heappush(entries, (key, next(self._ticks), member))
        return is_first

    def peek(self) -> T | None:
        """Return the first member, which stays in; None if there is none."""
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
        """Remove a member, if it is in, from wherever it is. It may be pushed again."""
        self._members.discard(member)
        if not self._members:
            self._entries.clear()  # so that an empty queue keeps no object alive
        elif len(self._entries) > 2 * len(self._members) + _MIN_DEAD:
            living = {member: tick for _, tick, member in self._entries if member in self._members}
            self._entries = [(self._key(member), tick, member) for member, tick in living.items()]
            heapify(self._entries)
