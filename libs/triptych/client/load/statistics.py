"""Figures of a measurement, with the names and definitions that the field uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.client.load.run import LoadResult, RequestRecord

LATE_S = 0.01
"""A request that is sent later than this after its time counts as late."""
GOAL_NAMES = ("ttft", "tpot", "e2el")
"""Figures of a request that goodput may set a limit to."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A figure over all requests, or over all gaps, in milliseconds. All are 0 where there is none."""

    count: int
    mean: float
    median: float
    std: float
    max: float
    percentiles: dict[str, float]
    """`p99` -> value."""


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The figures of one measurement. Rates are over its whole duration."""

    num_completed: int
    num_failed: int
    errors: dict[str, int]
    """Message -> how many requests failed with it."""
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts and outputs."""
    max_in_flight: int
    goodput_per_s: float | None
    """Requests that met all goals, per second. None: there were no goals."""
    num_late: int
    """Requests that were sent more than 10 ms after their time. Their latencies count from that time."""
    ttft_ms: Distribution
    """Due to first output."""
    tpot_ms: Distribution
    """First output to last, per token after the first; requests with one token have none."""
    itl_ms: Distribution
    """Between two arrivals of output, of all requests together."""
    e2el_ms: Distribution
    """Due to last output."""
    late_ms: Distribution
    """Due to sent."""


def summarize(result: LoadResult, percentiles: Sequence[float], goals_ms: Mapping[str, float]) -> LoadSummary:
    """Return the figures.

    Args:
        percentiles: Each from 0 to 100.
        goals_ms: Of `GOAL_NAMES` -> the largest good value in milliseconds.
    """
    good = [record for record in result.records if not record.error]
    figures = [figures_ms(record) for record in good]
    gaps_ms = [gap for record in good for gap in (np.diff(record.piece_times_s) * 1e3).tolist()]
    late_ms = [(record.sent_s - record.due_s) * 1e3 for record in result.records]
    num_input = sum(record.counts.num_input for record in good)
    num_output = sum(record.counts.num_output for record in good)
    met = sum(_meets(own, goals_ms) for own in figures)

    def per_s(count: float) -> float:
        return count / result.duration_s if result.duration_s > 0 else 0.0

    def over_requests(name: str) -> Distribution:
        return _distribution([own[name] for own in figures if name in own], percentiles)

    return LoadSummary(
        num_completed=len(good),
        num_failed=len(result.records) - len(good),
        errors=dict(Counter(record.error for record in result.records if record.error).most_common()),
        duration_s=result.duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        requests_per_s=per_s(len(good)),
        output_tokens_per_s=per_s(num_output),
        total_tokens_per_s=per_s(num_input + num_output),
        max_in_flight=int(in_flight(result.records)[1].max(initial=0)),
        goodput_per_s=per_s(met) if goals_ms else None,
        num_late=sum(late > LATE_S * 1e3 for late in late_ms),
        ttft_ms=over_requests("ttft"),
        tpot_ms=over_requests("tpot"),
        itl_ms=_distribution(gaps_ms, percentiles),
        e2el_ms=over_requests("e2el"),
        late_ms=_distribution(late_ms, percentiles),
    )


def figures_ms(record: RequestRecord) -> dict[str, float]:
    """Return the figures of one request; an answer without output has `e2el` only."""
    if not record.piece_times_s:
        return {"e2el": (record.ended_s - record.due_s) * 1e3}
    first_s, last_s = record.piece_times_s[0], record.piece_times_s[-1]
    figures = {"ttft": (first_s - record.due_s) * 1e3, "e2el": (last_s - record.due_s) * 1e3}
    if record.counts.num_output > 1:
        figures["tpot"] = (last_s - first_s) * 1e3 / (record.counts.num_output - 1)
    return figures


def _meets(figures: Mapping[str, float], goals_ms: Mapping[str, float]) -> bool:
    """Whether a request met all goals. One token has no time per token after it; no output meets no goal of it."""
    absent = {"tpot": 0.0}
    return all(figures.get(name, absent.get(name, math.inf)) <= limit for name, limit in goals_ms.items())


def in_flight(records: Sequence[RequestRecord]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the times at which the number of requests in flight changed, and the number from then on."""
    changes = sorted(
        [(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records]
    )
    times_s = np.array([time_s for time_s, _ in changes])
    return times_s, np.cumsum(np.array([change for _, change in changes], np.int64))


def _distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    names = [f"p{percent:g}" for percent in percentiles]
    if not values:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(names, 0.0))
    column = np.asarray(values)
    found = np.percentile(column, list(percentiles)).tolist() if names else []
    return Distribution(
        len(values),
        float(column.mean()),
        float(np.median(column)),
        float(column.std()),
        float(column.max()),
        dict(zip(names, found, strict=True)),
    )
