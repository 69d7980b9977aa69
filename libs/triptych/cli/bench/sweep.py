"""Latency by load: `bench serve --sweep`.

First the capacity is found: a closed loop with more and more users, doubled until two doublings in a row bring less
than 5% more requests per second. Then a point is measured at each share of the capacity: an open loop, with arrivals
that were drawn before, on a server that has nothing else to do. Latencies count from the time that a request was due,
so that neither a server nor a generator that is late hides anything. A generator that is late by itself makes the
server look slow, though, and such a point is marked as not valid.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.cli.access import Frontend
from triptych.cli.bench.requests import DrawnRequests
from triptych.cli.bench.server import open_backend, warm_up
from triptych.client.load.backends import Backend
from triptych.client.load.run import LoadResult, RequestRecord, draw_arrivals_within, run_load, run_users
from triptych.client.load.statistics import LATE_S, LoadSummary, summarize
from triptych.errors import TriptychError

DEFAULT_SHARES = "20,50,80,95,120"
"""Percent of the capacity."""
_MOST_REQUESTS = 20_000
"""Limit for a point, unless --num-prompts says otherwise."""
_FIRST_USERS, _MOST_USERS = 8, 1024
_LEAST_GAIN, _IN_VAIN = 1.05, 2
"""The search ends when so many doublings in a row gain less; one alone may be chance."""
_MUCH_MORE = 1.1
_PROBE_SHARE = 0.25
"""Time of a closed loop, as a share of that of a point: a rate takes fewer requests than a percentile."""
_MOST_PROBE_S = 60.0
"""A closed loop that takes longer has requests that are too long to be measured."""
_TIMEOUT_S = 60.0
"""A request that has not ended so long after it was due is given up, so that a server that hangs ends the sweep."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most requests per second that a server answers."""

    requests_per_s: float
    how: str
    """How it was found."""
    users_to_rate: Mapping[int, float] = field(default_factory=dict)
    """Users of each closed loop -> requests that it answered per second."""


@dataclass(frozen=True, slots=True)
class Point:
    """An open loop at a share of the capacity."""

    percent: float
    """Share of the capacity."""
    rate: float
    """Requests per second that the arrivals were drawn for."""
    offered_per_s: float
    """Requests per second that came of it."""
    goodput_per_s: float | None
    """Those that met all goals, per second in which requests came. None: there were no goals."""
    why_invalid: str
    """Why its latencies are not the server's; empty: they are."""
    summary: LoadSummary


class Sweep:
    """A sweep in progress: what it has measured by now."""

    def __init__(self, arguments: argparse.Namespace, shares: Sequence[float], goals_ms: Mapping[str, float]):
        """
        Args:
            arguments: Of `bench serve`.
            shares: Percent of the capacity, one for each point.
            goals_ms: As for `summarize`.
        """
        self._arguments = arguments
        self._shares = shares
        self._goals_ms = goals_ms
        self._generator = np.random.default_rng(arguments.seed)
        self.capacity: Capacity | None = None
        """The capacity; None while it is not found."""
        self.points: list[Point] = []

    async def run(self, frontend: Frontend) -> None:
        """Find the capacity, and measure all points.

        Raises:
            TriptychError: Requests fail in the search for the capacity.
        """
        arguments = self._arguments
        async with open_backend(frontend, arguments) as (backend, vocab_size, _):
            requests = DrawnRequests(arguments, self._generator, vocab_size)
            await warm_up(backend, requests.draw(arguments.num_warmups))
            self.capacity = await self._find_capacity(backend, requests)
            _say(_capacity_line(self.capacity))
            for percent in self._shares:
                self.points.append(await self._measure(backend, requests, percent))
                summary = self.points[-1].summary
                _say(f"{percent:g}%: {summary.num_completed} answered, {summary.num_failed} failed")

    async def _find_capacity(self, backend: Backend, requests: DrawnRequests) -> Capacity:
        if self._arguments.request_rate is not None:
            return Capacity(self._arguments.request_rate, "given by --request-rate")
        if (num_users := self._arguments.max_concurrency) is not None:
            rate = await self._probe(backend, requests, num_users)
            return Capacity(rate, f"a closed loop of {num_users} users, as given", {num_users: rate})
        users_to_rate: dict[int, float] = {}
        num_users, best, num_in_vain = _FIRST_USERS, 0.0, 0
        while num_users <= _MOST_USERS:
            rate = users_to_rate[num_users] = await self._probe(backend, requests, num_users)
            _say(f"{num_users} users: {rate:.2f} requests/s")
            num_in_vain = num_in_vain + 1 if rate < best * _LEAST_GAIN else 0
            best = max(rate, best)
            if num_in_vain == _IN_VAIN:
                break
            num_users *= 2
        else:
            return Capacity(
                best, f"closed loops of up to {_MOST_USERS} users; more may answer more", users_to_rate
            )
        how = (
            f"closed loops of {_FIRST_USERS} to {num_users} users, doubled until that gave less than 5% more"
        )
        return Capacity(best, how, users_to_rate)

    async def _probe(self, backend: Backend, requests: DrawnRequests, num_users: int) -> float:
        """Return the requests that a closed loop answers per second, once each user has had an answer."""
        probe_s = self._arguments.sweep_s * _PROBE_SHARE
        most = self._most_requests()
        ended: list[RequestRecord] = []
        over_s = math.inf

        def is_over(now_s: float) -> bool:
            nonlocal over_s
            has_enough = now_s >= probe_s and len(ended) >= 2 * num_users
            has_ended = has_enough or len(ended) >= most or now_s >= max(_MOST_PROBE_S, probe_s)
            if has_ended or any(record.error for record in ended[-num_users:]):
                over_s = min(over_s, now_s)
            return over_s <= now_s

        result = await run_users(backend, requests, num_users, is_over, ended.append, _TIMEOUT_S)
        return rate_of_users(result, num_users, over_s)

    async def _measure(self, backend: Backend, requests: DrawnRequests, percent: float) -> Point:
        assert self.capacity is not None, "it is found before the first point"
        arguments = self._arguments
        rate = self.capacity.requests_per_s * percent / 100
        arrivals_s = draw_arrivals_within(arguments.sweep_s, rate, arguments.burstiness, self._generator)
        duration_s = arguments.sweep_s
        if len(arrivals_s) > (most := self._most_requests()):
            arrivals_s, duration_s = arrivals_s[:most], float(arrivals_s[most])
        drawn = requests.draw(len(arrivals_s))
        result = await run_load(backend, drawn, arrivals_s.tolist(), None, timeout_s=_TIMEOUT_S)
        return point_of(result, percent, rate, duration_s, self._goals_ms)

    def _most_requests(self) -> int:
        return self._arguments.num_prompts or _MOST_REQUESTS

    def as_json(self) -> dict[str, Any]:
        """Return all that was measured, for a program."""
        names = ("backend", "dataset_name", "input_len", "output_len", "burstiness", "seed", "sweep_s")
        return {
            "load": {name: getattr(self._arguments, name) for name in names},
            "goals_ms": dict(self._goals_ms),
            "capacity": dataclasses.asdict(self.capacity) if self.capacity else None,
            "points": [dataclasses.asdict(point) for point in self.points],
        }

    def as_text(self) -> str:
        """Return all that was measured, as a table."""
        if self.capacity is None:
            return "interrupted before the capacity was found"
        lines = [_capacity_line(self.capacity)]
        if self._goals_ms:
            goals = ", ".join(f"{name} {limit:g} ms" for name, limit in self._goals_ms.items())
            lines.append(f"goodput     requests/s within {goals}")
        lines += [_HEADER, *map(_row, self.points)]
        most = max((point.summary.requests_per_s for point in self.points), default=0.0)
        if most > self.capacity.requests_per_s * _MUCH_MORE:
            lines.append(f"the capacity was found too low: {most:.2f} requests/s were answered")
        lines += [f"{p.percent:g}% is not valid: {p.why_invalid}" for p in self.points if p.why_invalid]
        return "\n".join(lines)


def rate_of_users(result: LoadResult, num_users: int, over_s: float) -> float:
    """Return the requests per second that a closed loop answered while it was full.

    It is the rate at which output came, in requests of the average length: answers of users that began together end
    together, and how many of them end within a time is chance. It counts from when as many answers had ended as there
    are users, to `over_s`, from which on no request was sent.

    Raises:
        TriptychError: A request failed, or there are too few answers.
    """
    for record in result.records:
        if record.error:
            raise TriptychError(f"--sweep: {num_users} users in a closed loop: {record.error}")
    ends_s = sorted(record.ended_s for record in result.records)
    from_s = ends_s[num_users - 1] if len(ends_s) >= num_users else math.inf
    if from_s >= over_s:
        raise TriptychError(
            f"--sweep: {num_users} users had {len(ends_s)} answers in {result.duration_s:.0f} s, and more than one "
            "each is needed; ask for shorter answers, more requests or more time"
        )
    num_answers = sum(
        sum(from_s < time_s <= over_s for time_s in record.piece_times_s) / len(record.piece_times_s)
        for record in result.records
        if record.piece_times_s
    )
    return num_answers / (over_s - from_s)


def point_of(
    result: LoadResult, percent: float, rate: float, duration_s: float, goals_ms: Mapping[str, float]
) -> Point:
    """Return the figures of an open loop in which requests came for `duration_s`."""
    summary = summarize(result, (50, 99), goals_ms)
    goodput_per_s = summary.goodput_per_s
    if goodput_per_s is not None:  # the last answers come later than the last requests
        goodput_per_s *= summary.duration_s / duration_s
    offered_per_s = len(result.records) / duration_s
    return Point(percent, rate, offered_per_s, goodput_per_s, _why_invalid(result, summary), summary)


def _why_invalid(result: LoadResult, summary: LoadSummary) -> str:
    if not result.records:
        return "no request came in its time"
    if (late_ms := summary.late_ms.percentiles["p99"]) > LATE_S * 1e3:
        return f"the generator sent requests {late_ms:.1f} ms late (p99), and may {LATE_S * 1e3:g}"
    if num_given_up := sum(record.ended_s - record.due_s >= _TIMEOUT_S for record in result.records):
        return f"{num_given_up} requests were given up after {_TIMEOUT_S:g} s, and are in no latency"
    return ""


_HEADER = (
    f"{'load':>6}{'offered/s':>11}{'answered/s':>12}{'requests':>10}{'failed':>8}{'TTFT p50':>11}{'p99':>9}"
    f"{'ITL p50':>9}{'p99':>9}{'goodput/s':>11}{'late p99':>10}"
)


def _row(point: Point) -> str:
    summary = point.summary
    goodput = "-" if point.goodput_per_s is None else f"{point.goodput_per_s:.2f}"
    figures = [summary.ttft_ms, summary.itl_ms]
    latencies = [figure.percentiles[name] for figure in figures for name in ("p50", "p99")]
    return (
        f"{f'{point.percent:g}%':>6}{point.offered_per_s:11.2f}{summary.requests_per_s:12.2f}"
        f"{summary.num_completed + summary.num_failed:10}{summary.num_failed:8}{latencies[0]:11.1f}"
        + "".join(f"{latency:9.1f}" for latency in latencies[1:])
        + f"{goodput:>11}{summary.late_ms.percentiles['p99']:10.1f}{' !' if point.why_invalid else ''}"
    )


def _capacity_line(capacity: Capacity) -> str:
    return f"capacity    {capacity.requests_per_s:.2f} requests/s: {capacity.how}"


def _say(line: str) -> None:
    print(f"sweep: {line}", file=sys.stderr)
