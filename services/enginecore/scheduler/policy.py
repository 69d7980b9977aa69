"""Scheduling policies, and limits on which requests run beside each other.

A new policy is a class here with an entry in `POLICIES`, and a choice of `scheduler.policy` in the config. A new limit
is a class here, made in `create_limits`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol

import numpy as np

from triptych.config import SchedulerConfig
from triptych.types.pooling import Task
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.heap import Key
from triptych_services.enginecore.scheduler.pace import PooledShare
from triptych_services.enginecore.scheduler.running_rows import RunningRows, Slots
from triptych_services.enginecore.tasks import MAX_VECTOR_BYTES, vector_bytes

TURN_S = 1.0
"""Seconds that an adapter waits for those that run, and that it may run while others wait."""
_MAX_STEP_VECTOR_BYTES = 3 * MAX_VECTOR_BYTES
"""With the tokens of the other rows it stays below the 64 MiB of a message."""


class SchedulingPolicy(Protocol):
    """Orders the requests that wait and those that run. It has no state.

    Some rules hold under every policy: a lower priority value goes first, requests that have run before go before those
    that have not, and tenants of one priority share.
    """

    @property
    def has_priorities(self) -> bool:
        """Whether requests may have a priority other than 0."""

    def waiting_key(self, request: Request) -> Key:
        """Return the sort key of a request among those of its tenant and priority that have never run.

        The lowest key is admitted first. The key must not change while the request waits, and no two requests have the
        same one.
        """

    def running_order(self, running: Sequence[Request]) -> list[Request]:
        """Sort running requests, which come in the order of their admission.

        The first is served first where the token budget is short. The last is preempted first where blocks are short.
        """


class FirstComeFirstServed:
    """Admits requests in the order of their arrival, and preempts those admitted last."""

    has_priorities = False

    def waiting_key(self, request: Request) -> Key:
        return request.arrival, 0

    def running_order(self, running: Sequence[Request]) -> list[Request]:
        return list(running)


class ByPriority(FirstComeFirstServed):
    """Serves lower priority values first, and requests of equal priority in the order of their arrival."""

    has_priorities = True

    def running_order(self, running: Sequence[Request]) -> list[Request]:
        return sorted(running, key=_by_urgency)


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
}
"""Value of `scheduler.policy` to the policy of that name."""


def create_policy(config: SchedulerConfig) -> SchedulingPolicy:
    return POLICIES[config.policy]()


class AdmissionLimit(Protocol):
    """A bound on the requests that run beside each other.

    Requests that it holds back let all those go first that it does not concern.
    """

    def group_of(self, request: Request) -> Hashable | None:
        """Return the group of requests that this one counts in, or None if the limit does not concern it.

        The group must not change while the request waits.
        """

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        """Count what the running rows use. Called before a step admits its first request.

        Args:
            rows: The counters of all rows.
            slots: Rows that run, in the order of their admission.
        """

    def has_room(self, group: Hashable) -> bool:
        """Return whether one more request of a group may be admitted in this step."""

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        """Count a request that this step admits.

        Args:
            request: Any request, also one that the limit does not concern.
            num_to_compute: Tokens of it that the cache does not hold.
        """


class LongPromptLimit:
    """Bounds how many long prompts are computed at a time, so that short ones need not wait for all of them."""

    def __init__(self, max_long_prompts: int, threshold: int) -> None:
        """Set the bound.

        Args:
            max_long_prompts: Long prompts that may be in partial prefill.
            threshold: A prompt is long while it has more than this number of tokens left to compute.
        """
        self._max_long_prompts = max_long_prompts
        self._threshold = threshold
        self._num_left = 0

    def group_of(self, request: Request) -> Hashable | None:
        return "long" if len(request.token_ids) > self._threshold else None

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        num_long = int(np.count_nonzero(rows.wanted(slots) > self._threshold))
        self._num_left = self._max_long_prompts - num_long

    def has_room(self, group: Hashable) -> bool:
        return self._num_left > 0

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        self._num_left -= num_to_compute > self._threshold


class AdapterLimit:
    """Bounds how many different adapters the running rows have, since the worker applies no more in a step.

    Requests of an adapter that runs, and those without one, pass the others. But when an adapter has waited for its
    turn, the one that has run for longest gets no more rows, and makes way when those that it has end.
    """

    def __init__(self, max_adapters: int, clock: Callable[[], float], turn_s: float = TURN_S) -> None:
        """
        Args:
            turn_s: As of `TURN_S`; infinity: none makes way for another.
        """
        self._max_adapters = max_adapters
        self._clock = clock
        self._turn_s = turn_s
        self._now_s = 0.0
        self._running: dict[Hashable, float] = {}
        """Adapters of the rows that run, and of those that the step admits -> since when."""
        self._waiting: dict[Hashable, float] = {}
        """Adapters that have found no room -> since when, ascending."""
        self._asked: set[Hashable] = set()
        """Adapters of waiting requests, which the steps since have asked for."""
        self._next: tuple[Hashable, ...] = ()
        """Adapters that have waited for their turn, the first first."""
        self._leaving: frozenset[Hashable] = frozenset()
        """Running adapters that get no more rows."""
        self._absent: frozenset[Hashable] = frozenset()
        """Adapters that the worker has not in memory, or is to drop."""

    def keep_waiting(self, absent: Collection[str]) -> None:
        """Admit no request for these adapters, until the next call."""
        self._absent = frozenset(absent)

    def group_of(self, request: Request) -> Hashable | None:
        return request.content.adapter or None

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        self._now_s = now_s = self._clock()
        adapters = (request.content.adapter for request in rows.slot_to_request.values())
        self._running = {adapter: self._running.get(adapter, now_s) for adapter in adapters if adapter}
        if self._asked:
            self._waiting = {each: since for each, since in self._waiting.items() if each in self._asked}
            self._asked.clear()
        turn_s, running = self._turn_s, self._running
        waited = [each for each, since in self._waiting.items() if now_s - since >= turn_s]
        self._next = tuple(each for each in waited if each not in running and each not in self._absent)
        oldest = sorted(
            (each for each in running if now_s - running[each] >= turn_s), key=running.__getitem__
        )
        num_free = max(self._max_adapters - len(running), 0)
        self._leaving = frozenset(oldest[: max(len(self._next) - num_free, 0)])

    def has_room(self, group: Hashable) -> bool:
        self._asked.add(group)
        if group in self._absent:
            has_room = False
        elif group in self._running:
            has_room = group not in self._leaving
        else:
            num_free = self._max_adapters - len(self._running)
            first = self._next[: max(num_free, 0)]
            has_room = group in first or len(first) < num_free
        if not has_room:
            self._waiting.setdefault(group, self._now_s)
        return has_room

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        adapter = request.content.adapter
        if adapter:
            self._running.setdefault(adapter, self._now_s)
            self._waiting.pop(adapter, None)
            self._next = tuple(each for each in self._next if each != adapter)


class TokenVectorLimit:
    """Bounds the bytes that rows with a vector for each token may report in one step, which is one message."""

    def __init__(self, embedding_size: int) -> None:
        self._embedding_size = embedding_size
        self._num_bytes = 0

    def group_of(self, request: Request) -> Hashable | None:
        return "token vectors" if self._bytes_of(request) else None

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        self._num_bytes = sum(map(self._bytes_of, rows.slot_to_request.values()))

    def has_room(self, group: Hashable) -> bool:
        return self._num_bytes <= _MAX_STEP_VECTOR_BYTES - MAX_VECTOR_BYTES

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        self._num_bytes += self._bytes_of(request)

    def _bytes_of(self, request: Request) -> int:
        pooling = request.content.pooling
        if pooling is None or pooling.task is not Task.TOKEN_EMBED:
            return 0
        return vector_bytes(request.num_prompt_tokens, pooling.dimensions or self._embedding_size)


def create_limits(
    config: SchedulerConfig,
    max_adapters: int = 0,
    embedding_size: int = 0,
    pooled_share: PooledShare | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[AdmissionLimit, ...]:
    """Return the limits that a config and a worker set.

    Args:
        max_adapters: As of `WorkerFacts`. With 0, no request has an adapter.
        embedding_size: As of `ModelFacts`. With 0, no request has vectors.
        pooled_share: The limit of texts beside rows that generate. None: the worker does not do both.
        clock: Monotonic time in seconds.
    """
    limits: list[AdmissionLimit] = [] if pooled_share is None else [pooled_share]
    if config.max_long_partial_prefills:
        limits.append(LongPromptLimit(config.max_long_partial_prefills, config.long_prefill_token_threshold))
    if max_adapters:
        # where requests have priorities, an adapter makes way for none that may be less urgent
        turn_s = math.inf if create_policy(config).has_priorities else TURN_S
        limits.append(AdapterLimit(max_adapters, clock, turn_s))
    if embedding_size:
        limits.append(TokenVectorLimit(embedding_size))
    return tuple(limits)


def _by_urgency(request: Request) -> Key:
    return request.head.priority, request.arrival
