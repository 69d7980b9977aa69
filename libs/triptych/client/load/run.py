"""Puts load on a server and records when each piece of output came.

Open loop: requests are sent at their times, whatever becomes of the others, and latencies count from those times. So a
server that stops for a second delays every request that was due in that second, and a client that is late makes
no figure better. Closed loop: a number of users each send their next request when the last is answered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.client.load.backends import Backend, TokenCounts
from triptych.client.load.datasets import LoadRequest
from triptych.errors import TriptychError


@dataclass(slots=True)
class RequestRecord:
    """The fate of one request. All times are in seconds since the start of the measurement."""

    due_s: float
    """When it was to be sent; latencies count from here. In a closed loop: when it was."""
    sent_s: float
    piece_times_s: list[float] = field(default_factory=list)
    """When output came."""
    ended_s: float = 0.0
    counts: TokenCounts = field(default_factory=lambda: TokenCounts(0, 0))
    error: str = ""
    """Why there is no whole answer; empty: there is."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a measurement."""

    records: list[RequestRecord]
    duration_s: float
    """From the start to the end of the last answer."""


def draw_arrivals(
    num_requests: int, rate: float, burstiness: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return ascending times in seconds, one per request; they are drawn before the first is sent.

    Args:
        rate: Requests per second on average. Infinite: all come at once.
        burstiness: Shape of the gamma distribution of the gaps. 1: a Poisson process; less: bursts; more: evener.
    """
    if math.isinf(rate):
        return np.zeros(num_requests)
    gaps_s = generator.gamma(burstiness, 1.0 / (rate * burstiness), num_requests)  # [num_requests]
    times_s: NDArray[np.float64] = np.cumsum(gaps_s)
    return times_s


def draw_arrivals_within(
    duration_s: float, rate: float, burstiness: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the ascending times in seconds below `duration_s`, as `draw_arrivals` draws them; perhaps none."""
    times_s = np.empty(0)
    while not times_s.size or times_s[-1] < duration_s:
        more = draw_arrivals(math.ceil(rate * duration_s) + 1, rate, burstiness, generator)
        times_s = np.concatenate((times_s, more + (times_s[-1] if times_s.size else 0.0)))
    return times_s[times_s < duration_s]


class _Sender:
    """Sends requests and records what becomes of them; its clock starts with it."""

    def __init__(
        self, backend: Backend, on_ended: Callable[[RequestRecord], None], timeout_s: float | None
    ) -> None:
        self._backend = backend
        self._on_ended = on_ended
        self._timeout_s = timeout_s
        self._started_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    async def send(self, request: LoadRequest, due_s: float | None) -> RequestRecord:
        """Send one request and return its record. `due_s`: None: now."""
        sent_s = self.now_s()
        record = RequestRecord(sent_s if due_s is None else due_s, sent_s)
        left_s = None if self._timeout_s is None else record.due_s + self._timeout_s - sent_s
        try:
            async with asyncio.timeout(left_s) as timer:
                record.counts = await self._backend.answer(
                    request, lambda: record.piece_times_s.append(self.now_s())
                )
        except TriptychError as error:
            record.error = str(error) or type(error).__name__
        except TimeoutError:
            if not timer.expired():
                raise
            record.error = f"no whole answer within {self._timeout_s:g} s"
        record.ended_s = self.now_s()
        self._on_ended(record)
        return record


async def run_load(
    backend: Backend,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float] | None,
    max_concurrency: int | None,
    on_ended: Callable[[RequestRecord], None] = lambda record: None,
    timeout_s: float | None = None,
) -> LoadResult:
    """Send every request once and wait for the end of all.

    Args:
        arrivals_s: When each is due, ascending. None: a closed loop of `max_concurrency` users.
        max_concurrency: Requests in flight at most; others wait, which counts as latency in an open loop. None: any
            number.
        timeout_s: A request that has not ended so long after it was due fails. None: all are waited for.
    """
    if arrivals_s is None:
        num_users = max_concurrency or len(requests)
        return await run_users(backend, requests, num_users, lambda now_s: False, on_ended, timeout_s)
    places = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    sender = _Sender(backend, on_ended, timeout_s)

    async def run_one(request: LoadRequest, due_s: float) -> RequestRecord:
        async with places:
            return await sender.send(request, due_s)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, due_s in zip(requests, arrivals_s, strict=True):
            if (pause_s := due_s - sender.now_s()) > 0:
                await asyncio.sleep(pause_s)
            tasks.append(group.create_task(run_one(request, float(due_s))))
    return _result_of([task.result() for task in tasks])


async def run_users(
    backend: Backend,
    requests: Iterable[LoadRequest],
    num_users: int,
    is_over: Callable[[float], bool],
    on_ended: Callable[[RequestRecord], None] = lambda record: None,
    timeout_s: float | None = None,
) -> LoadResult:
    """Let each user send its next request when its last is answered, until there is none or it is over.

    Args:
        requests: Shared by the users; may be without end.
        is_over: Called with the seconds since the start before each request; True: it and all later ones are not sent.
        timeout_s: As for `run_load`.
    """
    sender = _Sender(backend, on_ended, timeout_s)
    left = iter(requests)
    records: list[RequestRecord] = []

    async def run_user() -> None:
        while not is_over(sender.now_s()) and (request := next(left, None)) is not None:
            records.append(await sender.send(request, None))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_users):
            group.create_task(run_user())
    return _result_of(sorted(records, key=lambda record: record.sent_s))


def _result_of(records: list[RequestRecord]) -> LoadResult:
    return LoadResult(records, max((record.ended_s for record in records), default=0.0))
