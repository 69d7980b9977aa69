"""Fair shares between tenants: a virtual token counter for each tenant, inside each priority level.

The tenant that was served least goes first, so a tenant that floods the queue delays only itself. A counter holds the
prompt tokens computed for its tenant and its output tokens, weighted. Cached prompt tokens cost nothing, and neither do
recomputed ones, because the tenant did not cause them. Source: Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.heap import Key, LazyHeap
from triptych_services.enginecore.scheduler.running_rows import Ints, RunningRows

OUTPUT_WEIGHT = (
    2  # prompt tokens that an output token costs: the paper's value, and the usual ratio of prices
)
_MAX_IDLE = 1024  # tenants remembered per level after their last request, for what they were served


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant on one level, while it has requests, or was served more than the least served of the others."""

    name: str
    index: int
    """Index of its counters in the columns of `FairShares`."""
    priority: int
    """That of its level. A level refers to its tenants, and they not to it: both are freed without the collector."""
    num_alive: int = 0
    """Requests that have not ended."""


@dataclass(slots=True, eq=False)
class _PriorityLevel:
    """All tenants with one priority."""

    priority: int
    waiting: LazyHeap[_Tenant]
    """Tenants with waiting requests, least served first."""
    idle: LazyHeap[_Tenant]
    """Tenants without requests, least served first."""
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    num_alive: int = 0
    """Requests that have not ended."""
    last_waited: _Tenant | None = None
    """The last tenant that had waiting requests, while it is known."""
    last_floor: int = 0
    """Counter of the last tenant that had waiting requests, when it was forgotten."""


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The share of one tenant on one priority level, and the requests that it has waiting there."""

    priority: int
    tenant: str
    index: int
    """Index of its counters in the columns of `FairShares`."""
    tokens_served: int
    """In prompt tokens."""
    num_waiting: int
    """Requests that wait for their first admission."""


class FairShares:
    """The counters of all tenants. `RequestStates` owns it and reports all requests that come, wait, run and end.

    Output is charged when tenants are compared, not step by step; see `settle`.
    """

    def __init__(self) -> None:
        self.tokens_served: Ints = np.zeros(8, np.int64)
        """[tenants] what each tenant was served, in prompt tokens. `Request.tenant_index` is an index into it."""
        self._priority: Ints = np.zeros(8, np.int64)
        """[tenants] priority of each tenant's level."""
        self._num_waiting: Ints = np.zeros(8, np.int64)
        """[tenants] requests that were never admitted. A preempted request does not wait for its share."""
        self._num_waiting_tokens: Ints = np.zeros(8, np.int64)
        """[tenants] tokens of those requests."""
        self._free_indices = list(range(len(self.tokens_served)))
        self._levels: dict[int, _PriorityLevel] = {}
        self._tenants: dict[int, _Tenant] = {}
        """Index -> tenant."""

    @property
    def num_entries(self) -> int:
        """Number of entries in all heaps, those of tenants that left included."""
        return sum(level.waiting.num_entries + level.idle.num_entries for level in self._levels.values())

    def count_alive_by_priority(self) -> dict[int, int]:
        """Return priority -> requests of all tenants that have not ended."""
        return {level.priority: level.num_alive for level in self._levels.values()}

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of all requests that wait for their first admission."""
        return int(self._num_waiting_tokens.sum())

    def open(self, request: Request) -> None:
        """Take in a new request and give it its tenant's index."""
        level = self._levels.get(request.head.priority)
        if level is None:
            level = _PriorityLevel(request.head.priority, LazyHeap(self._key), LazyHeap(self._key))
            self._levels[request.head.priority] = level
        tenant = level.tenants.get(request.head.tenant)
        if tenant is None:
            tenant = self._create(level, request.head.tenant)
        if not tenant.num_alive:
            level.idle.discard(tenant)
        tenant.num_alive += 1
        level.num_alive += 1
        request.tenant_index = tenant.index

    def enqueue(self, request: Request) -> None:
        """Take in that a request waits for its first admission. The counters must be settled.

        A tenant that had no request waiting is raised to the least served tenant that has: idling saves nothing up.
        """
        tenant = self._tenants[request.tenant_index]
        if not self._num_waiting[tenant.index]:
            level = self._levels[tenant.priority]
            self.tokens_served[tenant.index] = max(self._floor(level), self.tokens_served[tenant.index])
            level.waiting.push(tenant)
        self._num_waiting[tenant.index] += 1
        self._num_waiting_tokens[tenant.index] += len(request.token_ids)

    def dequeue(self, request: Request) -> None:
        """Take in that a request has been admitted for the first time, or ends before that."""
        tenant = self._tenants[request.tenant_index]
        self._num_waiting[tenant.index] -= 1
        self._num_waiting_tokens[tenant.index] -= len(request.token_ids)
        if not self._num_waiting[tenant.index]:
            level = self._levels[tenant.priority]
            level.waiting.discard(tenant)
            level.last_waited = tenant

    def close(self, request: Request) -> None:
        """Take in that a request, which no longer waits, has ended. A level without requests forgets everything."""
        tenant = self._tenants[request.tenant_index]
        level = self._levels[tenant.priority]
        tenant.num_alive -= 1
        level.num_alive -= 1
        if not tenant.num_alive:
            level.idle.push(tenant)
        if not level.num_alive:
            del self._levels[level.priority]
            for forgotten in level.tenants.values():
                self._free(forgotten)
            return
        floor = self._floor(level)
        while (least := level.idle.peek()) is not None:
            if self.tokens_served[least.index] > floor and len(level.idle) <= _MAX_IDLE:
                break
            self._forget(least)

    def num_waiting(self, priority: int, tenant: str) -> int:
        """Return how many requests of this tenant and priority wait for their first admission."""
        level = self._levels.get(priority)
        known = None if level is None else level.tenants.get(tenant)
        return 0 if known is None else int(self._num_waiting[known.index])

    def greediest(self) -> TenantShare | None:
        """Return the tenant with the most waiting requests on the least urgent level on which any wait."""
        levels = [level for level in self._levels.values() if len(level.waiting)]
        if not levels:
            return None
        level = max(levels, key=lambda level: level.priority)
        return self._share_of(
            max(level.waiting, key=lambda tenant: (self._num_waiting[tenant.index], tenant.index))
        )

    def charge(self, request: Request, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Add to what the request's tenant was served."""
        self.tokens_served[request.tenant_index] += num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens

    def settle(self, rows: RunningRows) -> None:
        """Charge the tokens that running rows have put out since the last time. Called before counters are compared.

        Where no level has a second tenant no counter decides anything, and the rows keep their counts.
        """
        if len(self._tenants) > len(self._levels):
            self._charge_outputs(rows)

    def ahead_of(self, priority: int, tenant: str) -> tuple[int, int]:
        """Count the requests that have never run and would be admitted before one more request of a tenant.

        It is assumed that outputs cost nothing from now on, and that each tenant's requests have one size.

        Returns:
            The number of requests, and the number of their tokens.
        """
        waiting = np.flatnonzero(self._num_waiting)  # [w] indices of tenants, like all that follows
        waiting = waiting[self._priority[waiting] <= priority]
        counts = self._num_waiting[waiting]
        sizes = self._num_waiting_tokens[waiting] / counts
        level = self._levels.get(priority)
        if level is not None:
            gaps = self._counter_at_turn(level, tenant) - self.tokens_served[waiting]
            before = np.where(gaps >= 0, gaps // sizes + 1, 0).astype(np.int64)
            is_rival = self._priority[waiting] == priority
            if (own := level.tenants.get(tenant)) is not None:
                is_rival &= waiting != own.index
            counts = np.where(is_rival, np.minimum(counts, before), counts)
        return int(counts.sum()), round(float((counts * sizes).sum()))

    def check_integrity(self, requests: list[Request]) -> None:
        """Check every tenant.

        Args:
            requests: All requests that have not ended.

        Raises:
            AssertionError: Names the tenant and what is wrong.
        """
        used = set(self._tenants)
        assert not used & set(self._free_indices), "an index is free and in use"
        assert len(used) + len(self._free_indices) == len(self.tokens_served), "an index is lost"
        num_known = sum(len(level.tenants) for level in self._levels.values())
        assert num_known == len(used), "a tenant has no level"
        waiting: dict[int, list[int]] = {index: [] for index in used}
        num_alive = dict.fromkeys(used, 0)
        for request in requests:
            tenant = self._tenants[request.tenant_index]
            expected = tenant.priority, tenant.name
            assert expected == (request.head.priority, request.head.tenant), (
                f"request {request.head.request_id} has the index of {expected}"
            )
            num_alive[request.tenant_index] += 1
            if not request.is_returning:
                waiting[request.tenant_index].append(len(request.token_ids))
        for index, tenant in self._tenants.items():
            name, lengths = f"tenant {tenant.name!r}", waiting[index]
            counted = num_alive[index], len(lengths), sum(lengths)
            noted = tenant.num_alive, self._num_waiting[index], self._num_waiting_tokens[index]
            assert counted == noted, f"{name} has {counted}, and {noted} are noted"
            level = self._levels[tenant.priority]
            assert (tenant in level.idle) == (not tenant.num_alive), f"{name} idles wrongly"
            assert (tenant in level.waiting) == bool(lengths), f"{name} waits wrongly"

    def _charge_outputs(self, rows: RunningRows) -> None:
        slots = rows.running_order()
        charges = OUTPUT_WEIGHT * rows.take_tokens_to_charge(slots)
        np.add.at(self.tokens_served, rows.tenant_index[slots], charges)

    def _key(self, tenant: _Tenant) -> Key:
        return int(self.tokens_served[tenant.index]), tenant.index

    def _share_of(self, tenant: _Tenant) -> TenantShare:
        index = tenant.index
        served, num_waiting = int(self.tokens_served[index]), int(self._num_waiting[index])
        return TenantShare(tenant.priority, tenant.name, index, served, num_waiting)

    def _counter_at_turn(self, level: _PriorityLevel, name: str) -> int:
        """Return what the tenant's counter will be when one more request of it is its first."""
        tenant, floor = level.tenants.get(name), self._floor(level)
        if tenant is None:
            return floor
        served = max(floor, int(self.tokens_served[tenant.index]))
        return served + int(self._num_waiting_tokens[tenant.index])

    def _floor(self, level: _PriorityLevel) -> int:
        """Return the lowest counter of the tenants with waiting requests, or of the last that had any.

        It never falls.
        """
        tenant = level.waiting.peek() or level.last_waited
        return level.last_floor if tenant is None else int(self.tokens_served[tenant.index])

    def _create(self, level: _PriorityLevel, name: str) -> _Tenant:
        if not self._free_indices:
            size = len(self.tokens_served)
            self.tokens_served, self._priority, self._num_waiting, self._num_waiting_tokens = (
                np.concatenate([column, np.zeros(size, np.int64)])
                for column in (
                    self.tokens_served,
                    self._priority,
                    self._num_waiting,
                    self._num_waiting_tokens,
                )
            )
            self._free_indices.extend(range(size, 2 * size))
        tenant = _Tenant(name, self._free_indices.pop(), level.priority)
        self._priority[tenant.index] = level.priority
        level.tenants[name] = self._tenants[tenant.index] = tenant
        return tenant

    def _forget(self, tenant: _Tenant) -> None:
        level = self._levels[tenant.priority]
        level.idle.discard(tenant)
        if level.last_waited is tenant:
            level.last_waited, level.last_floor = None, int(self.tokens_served[tenant.index])
        del level.tenants[tenant.name]
        self._free(tenant)

    def _free(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.index]
        self.tokens_served[tenant.index] = 0
        self._free_indices.append(tenant.index)
