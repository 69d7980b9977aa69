"""Fair shares between tenants: a virtual token counter for each, inside each priority level.

Whoever has been served least goes first, so one that floods the queue delays itself alone. A counter holds
the prompt tokens computed for its tenant (cached ones cost nothing, recomputed ones are not its doing) and
its output tokens, weighted. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler.heap import Key, LazyHeap
from services.enginecore.scheduler.running_rows import Ints, RunningRows

OUTPUT_WEIGHT = 2  # of a prompt token's cost; the paper's, and the usual ratio of prices
_MOST_IDLE = 1024  # tenants remembered per level after their last request, for what they have had


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant on one level, while it has requests, or has had more than the least served of the others."""

    tenant: str
    index: int
    """Of its counter in `FairShares.service`."""
    level: _Level
    num_alive: int = 0


@dataclass(slots=True, eq=False)
class _Level:
    """One priority."""

    priority: int
    waiting: LazyHeap[_Account]
    """Least served first."""
    idle: LazyHeap[_Account]
    """Nothing alive; least served first."""
    accounts: dict[str, _Account] = field(default_factory=dict)
    num_alive: int = 0
    last_waited: _Account | None = None
    """The last whose waiting requests came to none, while it is known."""
    last_floor: int = 0
    """Its counter when it was forgotten."""


@dataclass(frozen=True, slots=True)
class WaitingTenant:
    """A tenant with requests that wait on one level."""

    priority: int
    account: int
    """Index of its counter in `FairShares.service`."""
    num_waiting: int


class FairShares:
    """Owned by the roster, which tells of every request that comes, waits, is admitted and goes.

    Output is charged when somebody is to be compared, not step by step: see `settle`.
    """

    def __init__(self) -> None:
        self.tokens_served: Ints = np.zeros(8, np.int64)
        """[accounts] what each has had, in prompt tokens; a request has the index."""
        self._priority: Ints = np.zeros(8, np.int64)
        """[accounts]"""
        self._num_waiting: Ints = np.zeros(8, np.int64)
        """[accounts] requests alive that are not admitted yet; a preempted request does not wait for its share."""
        self._num_waiting_tokens: Ints = np.zeros(8, np.int64)
        """[accounts] theirs."""
        self._free_indices = list(range(len(self.tokens_served)))
        self._levels: dict[int, _Level] = {}
        self._accounts: dict[int, _Account] = {}

    @property
    def has_rivals(self) -> bool:
        """Whether any level knows more than one tenant; else no counter decides anything."""
        return len(self._accounts) > len(self._levels)

    def open(self, request: Request) -> None:
        """A request has come: give it its tenant's account."""
        level = self._levels.get(request.priority)
        if level is None:
            level = _Level(request.priority, LazyHeap(self._place), LazyHeap(self._place))
            self._levels[request.priority] = level
        account = level.accounts.get(request.tenant)
        if account is None:
            account = self._create(level, request.tenant)
        level.idle.discard(account)
        account.num_alive += 1
        level.num_alive += 1
        request.tenant_index = account.index

    def enqueue(self, request: Request) -> None:
        """A request waits for its first admission. A tenant that had none waiting is lifted to the least
        served that has: idling saves nothing up. The counters must be settled."""
        account = self._accounts[request.tenant_index]
        if not self._num_waiting[account.index]:
            self.tokens_served[account.index] = max(
                self._floor(account.level), self.tokens_served[account.index]
            )
            account.level.waiting.push(account)
        self._num_waiting[account.index] += 1
        self._num_waiting_tokens[account.index] += len(request.token_ids)

    def dequeue(self, request: Request) -> None:
        """It has been admitted for the first time, or ends before that."""
        account = self._accounts[request.tenant_index]
        self._num_waiting[account.index] -= 1
        self._num_waiting_tokens[account.index] -= len(request.token_ids)
        if not self._num_waiting[account.index]:
            account.level.waiting.discard(account)
            account.level.last_waited = account

    def close(self, request: Request) -> None:
        """A request has ended, and does not wait any more. A level without requests forgets everything."""
        account = self._accounts[request.tenant_index]
        level = account.level
        account.num_alive -= 1
        level.num_alive -= 1
        if not account.num_alive:
            level.idle.push(account)
        if not level.num_alive:
            del self._levels[level.priority]
            for forgotten in level.accounts.values():
                self._free(forgotten)
            return
        floor = self._floor(level)
        while (least := level.idle.peek()) is not None:
            if self.tokens_served[least.index] > floor and len(level.idle) <= _MOST_IDLE:
                break
            self._forget(least)

    def num_waiting(self, priority: int, tenant: str) -> int:
        """Return how many requests of this tenant and priority wait for their first admission."""
        level = self._levels.get(priority)
        account = None if level is None else level.accounts.get(tenant)
        return 0 if account is None else int(self._num_waiting[account.index])

    def greediest(self) -> WaitingTenant | None:
        """Return the tenant with the most waiting requests on the least urgent level on which any wait."""
        levels = [level for level in self._levels.values() if len(level.waiting)]
        if not levels:
            return None
        level = max(levels, key=lambda level: level.priority)
        account = max(level.waiting, key=lambda account: (self._num_waiting[account.index], account.index))
        return WaitingTenant(level.priority, account.index, int(self._num_waiting[account.index]))

    def charge(self, request: Request, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        self.tokens_served[request.tenant_index] += num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens

    def settle(self, rows: RunningRows) -> None:
        """Charge what the running rows have put out since the last time; before counters are compared."""
        slots = rows.running_order()
        np.add.at(
            self.tokens_served, rows.tenant_index[slots], OUTPUT_WEIGHT * rows.take_tokens_to_charge(slots)
        )

    def ahead_of(self, priority: int, tenant: str) -> tuple[int, int]:
        """Requests that have never run and would be admitted before one more of this tenant, and their tokens.

        As if outputs cost nothing from now on, and each tenant's requests were of one size.
        """
        waiting = np.flatnonzero(self._num_waiting)  # [w] accounts, like all that follows
        waiting = waiting[self._priority[waiting] <= priority]
        counts = self._num_waiting[waiting]
        sizes = self._num_waiting_tokens[waiting] / counts
        level = self._levels.get(priority)
        if level is not None:
            gaps = self._place_behind_own(level, tenant) - self.tokens_served[waiting]
            before = np.where(gaps >= 0, gaps // sizes + 1, 0).astype(np.int64)
            is_rival = self._priority[waiting] == priority
            if (own := level.accounts.get(tenant)) is not None:
                is_rival &= waiting != own.index
            counts = np.where(is_rival, np.minimum(counts, before), counts)
        return int(counts.sum()), round(float((counts * sizes).sum()))

    def check_integrity(self, requests: list[Request]) -> None:
        """`requests`: all alive. Raises AssertionError naming what is off."""
        used = set(self._accounts)
        assert not used & set(self._free_indices), "an account is free and in use"
        assert len(used) + len(self._free_indices) == len(self.tokens_served), "an account is lost"
        assert sum(len(level.accounts) for level in self._levels.values()) == len(used), (
            "an account has no level"
        )
        waiting: dict[int, list[int]] = {index: [] for index in used}
        num_alive = dict.fromkeys(used, 0)
        for request in requests:
            account = self._accounts[request.tenant_index]
            mine = account.level.priority, account.tenant
            assert mine == (request.priority, request.tenant), (
                f"request {request.request_id} has another's account"
            )
            num_alive[request.tenant_index] += 1
            if not request.was_admitted:
                waiting[request.tenant_index].append(len(request.token_ids))
        for index, account in self._accounts.items():
            name, lengths = f"tenant {account.tenant!r}", waiting[index]
            counted = num_alive[index], len(lengths), sum(lengths)
            noted = account.num_alive, self._num_waiting[index], self._num_waiting_tokens[index]
            assert counted == noted, f"{name} has {counted}, and {noted} are noted"
            assert (account in account.level.idle) == (not account.num_alive), f"{name} idles wrongly"
            assert (account in account.level.waiting) == bool(lengths), f"{name} waits wrongly"

    def _place(self, account: _Account) -> Key:
        return int(self.tokens_served[account.index]), account.index

    def _place_behind_own(self, level: _Level, tenant: str) -> int:
        """The counter at which one more request of this tenant is its first."""
        account, floor = level.accounts.get(tenant), self._floor(level)
        if account is None:
            return floor
        return max(floor, int(self.tokens_served[account.index])) + int(
            self._num_waiting_tokens[account.index]
        )

    def _floor(self, level: _Level) -> int:
        """The least service of those that wait; of the last that did where nobody waits. Never falls."""
        account = level.waiting.peek() or level.last_waited
        return level.last_floor if account is None else int(self.tokens_served[account.index])

    def _create(self, level: _Level, tenant: str) -> _Account:
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
        account = _Account(tenant, self._free_indices.pop(), level)
        self._priority[account.index] = level.priority
        level.accounts[tenant] = self._accounts[account.index] = account
        return account

    def _forget(self, account: _Account) -> None:
        level = account.level
        level.idle.discard(account)
        if level.last_waited is account:
            level.last_waited, level.last_floor = None, int(self.tokens_served[account.index])
        del level.accounts[account.tenant]
        self._free(account)

    def _free(self, account: _Account) -> None:
        del self._accounts[account.index]
        self.tokens_served[account.index] = 0
        self._free_indices.append(account.index)
