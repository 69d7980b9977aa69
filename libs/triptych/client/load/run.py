"""Puts load on a server and records when each piece of output came.

Open loop: requests are sent at their times, whatever becomes of the others, and latencies count from those times. So a
server that stops for a second delays every request that was due in that second, and a client that is late makes
no figure better. Closed loop: a number of users each send their next request when the last is answered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
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


async def run_load(
    backend: Backend,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float] | None,
    max_concurrency: int | None,
    on_ended: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Send every request once and wait for the end of all.

    Args:
        arrivals_s: When each is due, ascending. None: a closed loop of `max_concurrency` users.
        max_concurrency: Requests in flight at most; others wait, which counts as latency in an open loop. None: any
            number.
    """
    places = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    started_s = time.perf_counter()

    def now_s() -> float:
        return time.perf_counter() - started_s

    async def run_one(request: LoadRequest, due_s: float | None) -> RequestRecord:
        async with places:
            sent_s = now_s()
            record = RequestRecord(sent_s if due_s is None else due_s, sent_s)
            try:
                record.counts = await backend.answer(request, lambda: record.piece_times_s.append(now_s()))
            except TriptychError as error:
                record.error = str(error) or type(error).__name__
            record.ended_s = now_s()
        on_ended(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            due_s = None if arrivals_s is None else float(arrivals_s[number])
            if due_s is not None and (pause_s := due_s - now_s()) > 0:
                await asyncio.sleep(pause_s)
            tasks.append(group.create_task(run_one(request, due_s)))
    records = [task.result() for task in tasks]
    return LoadResult(records, max((record.ended_s for record in records), default=0.0))
