"""Who is admitted next: the order of all that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, groupby

from services.enginecore.request import Request
from services.enginecore.scheduler.fairness import FairShares
from services.enginecore.scheduler.heap import Key, LazyHeap

Place = tuple[int, bool, int, int]


class WaitingQueue:
    """By priority, lower first. Inside a level those that have run already, by arrival: they keep their place
    at the head. Then the first of the tenant with the least service; ties go by arrival, so one tenant's
    requests are served strictly first come, first served.

    Long prompts stand in a queue of their own, so that short ones can pass them without a look at each.
    """

    def __init__(self, shares: FairShares, long_prompt_tokens: int | None) -> None:
        """Prompts of more than `long_prompt_tokens` are long; None: none is."""
        self._shares = shares
        self._long_prompt_tokens = long_prompt_tokens
        self._members: set[Request] = set()
        self._returning: dict[int, tuple[int, int]] = {}
        """Priority to the number of requests that have run already, and the number of their tokens."""
        self._displaceable: dict[int, dict[Request, None]] = {}
        """Account -> its requests that have never run, here or elsewhere, in order of arrival; no entry is empty."""
        self._allowed: frozenset[Request] | None = None
        self._short, self._long = _OrderedQueue(shares), _OrderedQueue(shares)

    def __len__(self) -> int:
        """Held back ones included."""
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def returning_ahead(self, priority: int) -> tuple[int, int]:
        """Return the number of requests that have run already and are as urgent at least, and of their tokens."""
        totals = [total for level, total in self._returning.items() if level <= priority]
        return sum(count for count, _ in totals), sum(num_tokens for _, num_tokens in totals)

    def add(self, request: Request) -> None:
        """A request waits: for its first admission, or, having run, for its next."""
        self._members.add(request)
        if request.was_admitted:
            self._count_returning(request, 1)
        else:
            self._shares.enqueue(request)
            if not request.has_emitted:
                self._displaceable.setdefault(request.tenant_index, {})[request] = None
        self._line_up(request)

    def remove(self, request: Request) -> None:
        """It is admitted, or ends."""
        self._members.remove(request)
        if request.was_admitted:
            self._count_returning(request, -1)
        else:
            self._shares.dequeue(request)
            if not request.has_emitted:
                displaceable = self._displaceable[request.tenant_index]
                del displaceable[request]
                if not displaceable:
                    del self._displaceable[request.tenant_index]
        if self._may_run(request):
            self._queue_of(request).remove(request)

    def latest_of(self, account: int) -> Iterator[list[Request]]:
        """Yield an account's requests that have never run, here or elsewhere: the last come first, the choices of one
        client's request together.
        """
        newest_first = reversed(self._displaceable.get(account, {}))
        for _, choices in groupby(newest_first, key=lambda request: id(request.content)):
            yield list(choices)

    def peek(self, *, pass_over_long: bool = False) -> Request | None:
        """The next to be admitted; it stays. The counters of the shares must be settled."""
        short = self._short.peek()
        if pass_over_long or (long := self._long.peek()) is None:
            return short
        return long if short is None else min(short, long, key=self.place_of)

    def place_of(self, request: Request) -> Place:
        """What the first of a tenant sorts by among the first of all."""
        if request.was_admitted:
            return request.priority, False, 0, request.arrival
        return request.priority, True, int(self._shares.tokens_served[request.tenant_index]), request.arrival

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Hold back all others, those still to come included; None lifts it. Holding back costs no share."""
        allowed = None if requests is None else frozenset(requests)
        if allowed == self._allowed:
            return
        self._allowed = allowed
        self._short, self._long = _OrderedQueue(self._shares), _OrderedQueue(self._shares)
        for request in sorted(self._members, key=_by_arrival):
            self._line_up(request)

    def check_integrity(self) -> None:
        """Raises AssertionError if the queues do not hold who may run, or disagree with a plain search."""
        free = {request for request in self._members if self._may_run(request)}
        displaceable = {request for lane in self._displaceable.values() for request in lane}
        never_ran = {
            request for request in self._members if not (request.was_admitted or request.has_emitted)
        }
        assert displaceable == never_ran, "a request that never ran is lost, or runs"
        assert {*self._short, *self._long} == free, "the queues do not hold exactly those that may run"
        assert self.peek() is min(free, key=self.place_of, default=None), "the first is not at the head"
        returning: dict[int, tuple[int, int]] = {}
        for request in self._members:
            if request.was_admitted:
                count, num_tokens = returning.get(request.priority, (0, 0))
                returning[request.priority] = count + 1, num_tokens + len(request.token_ids)
        assert returning == self._returning, "the count of those that have run is off"
        short = {request for request in free if self._queue_of(request) is self._short}
        first_short = self.peek(pass_over_long=True)
        assert first_short is min(short, key=self.place_of, default=None), "the first short is not found"

    def _count_returning(self, request: Request, change: int) -> None:
        count, num_tokens = self._returning.get(request.priority, (0, 0))
        count, num_tokens = count + change, num_tokens + change * len(request.token_ids)
        if count:
            self._returning[request.priority] = count, num_tokens
        else:
            del self._returning[request.priority]

    def _may_run(self, request: Request) -> bool:
        return self._allowed is None or request in self._allowed

    def _line_up(self, request: Request) -> None:
        if self._may_run(request):
            self._queue_of(request).add(request)

    def _queue_of(self, request: Request) -> _OrderedQueue:
        limit = self._long_prompt_tokens
        return self._short if limit is None or len(request.token_ids) <= limit else self._long


class _OrderedQueue:
    """Requests in the order of `WaitingQueue.place_of`: a heap of levels, each a heap of tenants."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._order: LazyHeap[_Level] = LazyHeap(lambda level: (level.priority, 0))

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return (request for level in self._levels.values() for request in level)

    def add(self, request: Request) -> None:
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level(request.priority, self._shares)
            self._order.push(level)
        level.add(request)

    def remove(self, request: Request) -> None:
        level = self._levels[request.priority]
        level.remove(request)
        if level.is_empty:
            del self._levels[request.priority]
            self._order.discard(level)

    def peek(self) -> Request | None:
        level = self._order.peek()
        return None if level is None else level.peek()


class _Level:
    """The waiting requests of one priority. None of these keys falls while its member is in."""

    def __init__(self, priority: int, shares: FairShares) -> None:
        self.priority = priority
        self._shares = shares
        self._returning: LazyHeap[Request] = LazyHeap(_by_arrival)
        self._lanes: dict[int, LazyHeap[Request]] = {}
        """By account, none empty."""
        self._accounts: LazyHeap[int] = LazyHeap(self._place_of_lane)

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return chain(self._returning, *self._lanes.values())

    @property
    def is_empty(self) -> bool:
        return not self._returning and not self._lanes

    def add(self, request: Request) -> None:
        if request.was_admitted:
            self._returning.push(request)
        elif (lane := self._lanes.get(request.tenant_index)) is not None:
            lane.push(request)
        else:
            self._lanes[request.tenant_index] = lane = LazyHeap(_by_arrival)
            lane.push(request)
            self._accounts.push(request.tenant_index)

    def remove(self, request: Request) -> None:
        if request.was_admitted:
            self._returning.discard(request)
            return
        lane = self._lanes[request.tenant_index]
        lane.discard(request)
        if not lane:
            self._accounts.discard(request.tenant_index)
            del self._lanes[request.tenant_index]

    def peek(self) -> Request | None:
        first = self._returning.peek()
        if first is None and (account := self._accounts.peek()) is not None:
            first = self._lanes[account].peek()
        return first

    def _place_of_lane(self, account: int) -> Key:
        first = self._lanes[account].peek()
        assert first is not None, "an empty lane queues"
        return int(self._shares.tokens_served[account]), first.arrival


def _by_arrival(request: Request) -> Key:
    return request.arrival, 0
