"""All requests that have not ended, and the ways in which they are found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.heap import Key, LazyHeap


class RequestIndex:
    """All requests that have not ended, by number, request_id, adapter and deadline. `RequestStates` owns it."""

    def __init__(self) -> None:
        self.num_content_bytes = 0
        """Bytes of the prompts and sampling parameters of all requests. Choices of one request count once."""
        self._alive: dict[tuple[int, int], Request] = {}
        """Session and number -> request, in the order of arrival."""
        self._id_to_num_alive: dict[tuple[int, str, str], int] = {}
        """Session, tenant and request_id -> choices that have not ended."""
        self.adapters: dict[str, Counter[tuple[str, int]]] = {}
        """Digest of each adapter -> tenant and priority of the requests for it -> how many have not ended."""
        self._deadlines: LazyHeap[Request] = LazyHeap(_by_deadline)
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests in the order of their arrival."""
        return iter(self._alive.values())

    @property
    def num_entries(self) -> int:
        """Number of entries in the heap of deadlines, those of requests that left included."""
        return self._deadlines.num_entries

    @property
    def next_deadline(self) -> float:
        """The earliest deadline, in seconds of the clock; inf: no request has one."""
        request = self._deadlines.peek()
        return math.inf if request is None else _by_deadline(request)[0]

    def next_expired(self, now: float) -> Request | None:
        """Return a request with a deadline that has passed, the earliest deadline first; None if there is none."""
        request = self._deadlines.peek()
        return request if request is not None and _by_deadline(request)[0] <= now else None

    def by_number(self, session: int, number: int) -> Request | None:
        return self._alive.get((session, number))

    def has_id_of(self, request: Request) -> bool:
        """Return whether the session has a request of the same tenant and request_id."""
        return _id_of(request) in self._id_to_num_alive

    def num_alive_of(self, request: Request) -> int:
        """Return how many choices of a client's request have not ended.

        Args:
            request: One of the choices.
        """
        return self._id_to_num_alive[_id_of(request)]

    def add(self, request: Request) -> None:
        """Add a new request, and note its place in the order of arrival."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._alive[request.session, request.number] = request
        key = _id_of(request)
        if key not in self._id_to_num_alive:
            self._id_to_num_alive[key] = 0
            self.num_content_bytes += request.content.num_bytes
        self._id_to_num_alive[key] += 1
        if digest := request.content.adapter:
            self.adapters.setdefault(digest, Counter())[_urgency_of(request)] += 1
        if request.deadline is not None:
            self._deadlines.push(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._deadlines.discard(request)
        del self._alive[request.session, request.number]
        key = _id_of(request)
        self._id_to_num_alive[key] -= 1
        if not self._id_to_num_alive[key]:
            del self._id_to_num_alive[key]
            self.num_content_bytes -= request.content.num_bytes
        if digest := request.content.adapter:
            asking = self.adapters[digest]
            asking[_urgency_of(request)] -= 1
            if not asking[_urgency_of(request)]:
                del asking[_urgency_of(request)]
            if not asking:
                del self.adapters[digest]

    def check_integrity(self) -> None:
        """Check every request.

        Raises:
            AssertionError: Names the request and what is wrong.
        """
        num_alive = Counter(_id_of(request) for request in self)
        assert num_alive == self._id_to_num_alive, "choices are counted wrongly"
        num_bytes = sum({_id_of(request): request.content.num_bytes for request in self}.values())
        assert num_bytes == self.num_content_bytes, f"{num_bytes} bytes, {self.num_content_bytes} are noted"
        asking: dict[str, Counter[tuple[str, int]]] = {}
        for request in self:
            if digest := request.content.adapter:
                asking.setdefault(digest, Counter())[_urgency_of(request)] += 1
        assert asking == self.adapters, "requests for adapters are counted wrongly"
        for request in self:
            has_deadline = request in self._deadlines
            assert has_deadline == (request.deadline is not None), (
                f"request {request.head.request_id} is lost to its deadline"
            )


def _id_of(request: Request) -> tuple[int, str, str]:
    return request.session, request.head.tenant, request.head.request_id


def _urgency_of(request: Request) -> tuple[str, int]:
    return request.head.tenant, request.head.priority


def _by_deadline(request: Request) -> Key:
    assert request.deadline is not None
    return request.deadline, request.arrival
