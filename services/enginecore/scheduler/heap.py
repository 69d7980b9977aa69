"""A priority queue of requests whose members may leave from the middle."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from services.enginecore.request import Request

Key = tuple[float, int]
"""What sorts first, then the arrival, which no two requests share. Constant while a request is in."""

_LEAST_DEAD = 64  # fewer dead entries than this cost less than sweeping them out


class RequestHeap:
    """Smallest key first. Who ends out of turn is crossed out at once and swept out later; the dead never
    outnumber the living by more than a constant, whatever clients do."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._entries: list[tuple[Key, Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        assert request not in self._members, f"request {request.request_id} queues twice"
        self._members.add(request)
        heappush(self._entries, (self._key(request), request))

    def peek(self) -> Request | None:
        """The first; it stays."""
        while self._entries and self._entries[0][1] not in self._members:
            heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop(self) -> Request:
        """The first, which leaves and may come again. There must be one."""
        first = self.peek()
        assert first is not None, "pop from an empty queue"
        heappop(self._entries)
        self._members.remove(first)
        return first

    def discard(self, request: Request) -> None:
        """Take a request out for good, if it is in: it must not be pushed again."""
        self._members.discard(request)
        if len(self._entries) > 2 * len(self._members) + _LEAST_DEAD:
            self._entries = [entry for entry in self._entries if entry[1] in self._members]
            heapify(self._entries)
