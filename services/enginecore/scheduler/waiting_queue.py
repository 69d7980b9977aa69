"""The order in which waiting requests are admitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from enum import Flag, auto
from functools import partial
from itertools import chain, groupby

from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.fairness import FairShares
from triptych_services.enginecore.scheduler.heap import Key, LazyHeap
from triptych_services.enginecore.scheduler.policy import AdmissionLimit, SchedulingPolicy
from triptych_services.enginecore.scheduler.running_rows import RunningRows, Slots


class WaitsFor(Flag):
    """Reasons why a request cannot be admitted, whatever its place in the queue."""

    RESULTS = auto()
    """Results of steps in flight, of a request that was preempted."""
    PROMPT = auto()
    """The steps in which another choice of the same request computes the prompt."""
    RESTRICTION = auto()
    """The end of a pause or of a crash investigation."""
    REMOTE_KV = auto()
    """Blocks of the prompt, which another worker computes."""
    FORM = auto()
    """The grammar of its output, which the worker compiles. It is tried again after a while."""


class WaitingQueue:
    """All requests that wait. A lower priority value goes first.

    Inside a priority, requests that have run before go first, by arrival: they keep their place. Then comes the first
    request of the tenant that was served least, and of equal tenants the one with the lower key of the policy.

    A held request waits for something, and those behind it pass it. Requests that an admission limit concerns are in
    queues of their own, so that all others pass them without a look at each.
    """

    def __init__(
        self, shares: FairShares, policy: SchedulingPolicy, limits: Sequence[AdmissionLimit] = ()
    ) -> None:
        self._shares = shares
        self._policy = policy
        self._limits = limits
        self._members: set[Request] = set()
        self._held: dict[Request, WaitsFor] = {}
        """Requests that cannot be admitted -> everything that they wait for."""
        self._returning: dict[int, tuple[int, int]] = {}
        """Priority -> number of requests that have run before, and number of their tokens."""
        self._displaceable: dict[int, dict[Request, None]] = {}
        """Tenant index -> its requests that have never run, here or elsewhere, by arrival. No entry is empty."""
        self._allowed: frozenset[Request] | None = None
        self._queues: dict[tuple[Hashable | None, ...], _OrderedQueue] = {}
        """Group of each limit -> its requests that are not held. Only the queue of no group may be empty."""

    def __len__(self) -> int:
        """Return the number of all requests, the held ones included."""
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests in no particular order."""
        return iter(self._members)

    @property
    def num_ready(self) -> int:
        """Number of requests that are not held."""
        return len(self._members) - len(self._held)

    @property
    def num_entries(self) -> int:
        """Number of entries in all heaps, those of requests that left included."""
        return sum(queue.num_entries for queue in self._queues.values())

    @property
    def num_returning_tokens(self) -> int:
        """Number of tokens of all requests that have run before."""
        return sum(num_tokens for _, num_tokens in self._returning.values())

    def returning_ahead(self, priority: int) -> tuple[int, int]:
        """Return the number of requests of this priority or a lower value that have run before, and of their tokens."""
        totals = [total for level, total in self._returning.items() if level <= priority]
        return sum(count for count, _ in totals), sum(num_tokens for _, num_tokens in totals)

    def add(self, request: Request, *, waits_for: WaitsFor | None = None) -> None:
        """Add a request that waits for its first admission or, having run, for its next.

        Args:
            request: The request.
            waits_for: What the request waits for before it can be admitted; None if for nothing.
        """
        self._members.add(request)
        if request.is_returning:
            self._count_returning(request, 1, len(request.token_ids))
        else:
            self._shares.enqueue(request)
            self._displaceable.setdefault(request.tenant_index, {})[request] = None
        if self._allowed is not None and request not in self._allowed:
            waits_for = WaitsFor.RESTRICTION if waits_for is None else waits_for | WaitsFor.RESTRICTION
        if waits_for is None:
            self._line_up(request)
        else:
            self._held[request] = waits_for

    def remove(self, request: Request) -> None:
        """Remove a request that is admitted, or ends."""
        self._members.remove(request)
        if request.is_returning:
            self._count_returning(request, -1, -len(request.token_ids))
        else:
            self._shares.dequeue(request)
            displaceable = self._displaceable[request.tenant_index]
            del displaceable[request]
            if not displaceable:
                del self._displaceable[request.tenant_index]
        if self._held.pop(request, None) is None:
            self._step_out(request)

    def hold(self, request: Request, reason: WaitsFor) -> None:
        """Let all others pass a request until `release` is called for the same reason. Its tenant loses no share."""
        waits_for = self._held.get(request)
        if waits_for is None:
            self._step_out(request)
            self._held[request] = reason
        else:
            self._held[request] = waits_for | reason

    def release(self, request: Request, reason: WaitsFor) -> None:
        """Take back a reason to hold a request. Without another one it may be admitted."""
        waits_for = self._held.get(request)
        if waits_for is None:
            return
        if waits_for := waits_for & ~reason:
            self._held[request] = waits_for
        else:
            del self._held[request]
            self._line_up(request)

    def held_for(self, reason: WaitsFor) -> set[Request]:
        """Return the requests that are held for a reason, among others maybe."""
        return {request for request, waits_for in self._held.items() if reason in waits_for}

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Hold all other requests, those still to come included. None lifts this."""
        allowed = None if requests is None else frozenset(requests)
        if allowed == self._allowed:
            return
        self._allowed = allowed
        for request in self._members:
            if allowed is None or request in allowed:
                self.release(request, WaitsFor.RESTRICTION)
            else:
                self.hold(request, WaitsFor.RESTRICTION)

    def replace_limits(self, limits: Sequence[AdmissionLimit]) -> None:
        """Line up all requests that are not held by other admission limits: those of another worker."""
        ready = [request for queue in self._queues.values() for request in queue]
        self._limits = limits
        self._queues.clear()
        for request in ready:
            self._line_up(request)

    def count_late_tokens(self, request: Request, num_tokens: int) -> None:
        """Take in that a request that waits for results has got more tokens."""
        self._count_returning(request, 0, num_tokens)

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        """Let the admission limits count the rows that run, before a step admits its first request."""
        for limit in self._limits:
            limit.begin_step(rows, slots)

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        """Let the admission limits count a request that this step admits, and its tokens to compute."""
        for limit in self._limits:
            limit.note_admitted(request, num_to_compute)

    def latest_of(self, tenant_index: int) -> Iterator[list[Request]]:
        """Yield a tenant's requests that have never run, here or elsewhere, the last first.

        The choices of one client's request come together.
        """
        newest_first = reversed(self._displaceable.get(tenant_index, {}))
        for _, choices in groupby(newest_first, key=lambda request: id(request.content)):
            yield list(choices)

    def peek(self) -> Request | None:
        """Return the next request to be admitted, which stays; None if there is none.

        The shares must be settled, and `begin_step` called in this step.
        """
        first: Request | None = None
        for groups, queue in self._queues.items():
            if queue.is_empty or (groups and not self._has_room(groups)):
                continue
            request = queue.peek()
            if first is None or self.key_of(request) < self.key_of(first):
                first = request
        return first

    def key_of(self, request: Request) -> Key:
        """Return the key that the first request of each queue and tenant is compared by."""
        if request.is_returning:
            return request.head.priority, 0, 0, request.arrival
        served = int(self._shares.tokens_served[request.tenant_index])
        return request.head.priority, 1, served, *self._policy.waiting_key(request)

    def check_integrity(self) -> None:
        """Compare everything with a plain search.

        Raises:
            AssertionError: Names what is wrong.
        """
        assert self._held.keys() <= self._members, "a request is held and does not wait"
        ready = self._members - self._held.keys()
        displaceable = {request for queue in self._displaceable.values() for request in queue}
        never_ran = {request for request in self._members if not request.is_returning}
        assert displaceable == never_ran, "a request that never ran is lost, or runs"
        if self._allowed is not None:
            restricted = self.held_for(WaitsFor.RESTRICTION)
            assert restricted == self._members - self._allowed, "the wrong requests are held"
        lined_up: set[Request] = set()
        for groups, queue in self._queues.items():
            members = set(queue)
            if not members:
                assert not groups, "a queue of a group is empty"
                continue
            assert all(self._groups_of(request) == groups for request in members), "in the wrong queue"
            assert queue.peek() is min(members, key=self.key_of), "the first is not at the head"
            lined_up |= members
        assert lined_up == ready, "the queues do not hold exactly the requests that are not held"
        returning: dict[int, tuple[int, int]] = {}
        for request in self._members:
            if request.is_returning:
                count, num_tokens = returning.get(request.head.priority, (0, 0))
                returning[request.head.priority] = count + 1, num_tokens + len(request.token_ids)
        assert returning == self._returning, "the count of those that have run is wrong"

    def _count_returning(self, request: Request, num_requests: int, num_tokens: int) -> None:
        before = self._returning.get(request.head.priority, (0, 0))
        count = before[0] + num_requests
        if count:
            self._returning[request.head.priority] = count, before[1] + num_tokens
        else:
            del self._returning[request.head.priority]

    def _groups_of(self, request: Request) -> tuple[Hashable | None, ...]:
        return tuple(limit.group_of(request) for limit in self._limits) if self._limits else ()

    def _has_room(self, groups: tuple[Hashable | None, ...]) -> bool:
        return all(
            group is None or limit.has_room(group) for limit, group in zip(self._limits, groups, strict=True)
        )

    def _line_up(self, request: Request) -> None:
        groups = self._groups_of(request)
        queue = self._queues.get(groups)
        if queue is None:
            queue = self._queues[groups] = _OrderedQueue(self._shares, self._policy)
        queue.add(request)

    def _step_out(self, request: Request) -> None:
        groups = self._groups_of(request)
        queue = self._queues[groups]
        queue.remove(request)
        if queue.is_empty and groups:
            del self._queues[groups]


class _OrderedQueue:
    """Requests in the order of `WaitingQueue.key_of`: a heap of priorities, each with a heap of tenants."""

    def __init__(self, shares: FairShares, policy: SchedulingPolicy) -> None:
        self._shares = shares
        self._policy = policy
        self._levels: dict[int, _PriorityQueue] = {}
        self._order: LazyHeap[_PriorityQueue] = LazyHeap(_PriorityQueue.key)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        return (request for level in self._levels.values() for request in level)

    @property
    def is_empty(self) -> bool:
        return not self._levels

    @property
    def num_entries(self) -> int:
        return self._order.num_entries + sum(level.num_entries for level in self._levels.values())

    def add(self, request: Request) -> None:
        level = self._levels.get(request.head.priority)
        if level is None:
            level = _PriorityQueue(request.head.priority, self._shares, self._policy)
            self._levels[request.head.priority] = level
            self._order.push(level)
        level.add(request)

    def remove(self, request: Request) -> None:
        level = self._levels[request.head.priority]
        level.remove(request)
        if level.is_empty:
            del self._levels[request.head.priority]
            self._order.discard(level)

    def peek(self) -> Request:
        """Return the first request. There must be one."""
        level = self._order.peek()
        assert level is not None, "an empty queue is asked for its first request"
        return level.peek()


class _PriorityQueue:
    """The waiting requests of one priority."""

    def __init__(self, priority: int, shares: FairShares, policy: SchedulingPolicy) -> None:
        self._priority = priority
        self._waiting_key = policy.waiting_key
        self._returning: LazyHeap[Request] = LazyHeap(_by_arrival)
        self._tenant_queues: dict[int, LazyHeap[Request]] = {}
        """Tenant index -> its requests that have never run. No queue is empty."""
        self._tenants: LazyHeap[int] = LazyHeap(
            partial(_tenant_key, self._tenant_queues, shares, self._waiting_key)
        )

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        return chain(self._returning, *self._tenant_queues.values())

    @property
    def is_empty(self) -> bool:
        return not self._returning and not self._tenant_queues

    @property
    def num_entries(self) -> int:
        queues = (self._returning, *self._tenant_queues.values())
        return self._tenants.num_entries + sum(queue.num_entries for queue in queues)

    def key(self) -> Key:
        return (self._priority,)

    def add(self, request: Request) -> None:
        if request.is_returning:
            self._returning.push(request)
            return
        tenant = request.tenant_index
        queue = self._tenant_queues.get(tenant)
        if queue is None:
            queue = self._tenant_queues[tenant] = LazyHeap(self._waiting_key)
            queue.push(request)
            self._tenants.push(tenant)
            return
        if queue.push(request):
            self._tenants.discard(tenant)  # its key may have fallen
            self._tenants.push(tenant)

    def remove(self, request: Request) -> None:
        if request.is_returning:
            self._returning.discard(request)
            return
        queue = self._tenant_queues[request.tenant_index]
        queue.discard(request)
        if not queue:
            self._tenants.discard(request.tenant_index)
            del self._tenant_queues[request.tenant_index]

    def peek(self) -> Request:
        """Return the first request. There must be one."""
        first = self._returning.peek()
        if first is None and (tenant := self._tenants.peek()) is not None:
            first = self._tenant_queues[tenant].peek()
        assert first is not None, "an empty queue is asked for its first request"
        return first


def _tenant_key(
    queues: Mapping[int, LazyHeap[Request]],
    shares: FairShares,
    waiting_key: Callable[[Request], Key],
    tenant: int,
) -> Key:
    """Return the key of a tenant in `_PriorityQueue`, which this does not refer to: so it is freed when it is empty."""
    first = queues[tenant].peek()
    assert first is not None, "a tenant without waiting requests is in the queue"
    return int(shares.tokens_served[tenant]), *waiting_key(first)


def _by_arrival(request: Request) -> Key:
    return (request.arrival,)
