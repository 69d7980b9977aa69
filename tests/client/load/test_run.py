"""Open and closed loops on a clock of the test's own; the arithmetic of figures on synthetic streams."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from tests.helpers.slow_server import Clock, Server
from triptych.client.load.backends import TokenCounts
from triptych.client.load.datasets import LoadRequest
from triptych.client.load.run import (
    LoadResult,
    RequestRecord,
    draw_arrivals,
    draw_arrivals_within,
    run_load,
    run_users,
)
from triptych.client.load.statistics import in_flight, summarize
from triptych.errors import EngineFailure


def requests(num, max_tokens=5):
    return [LoadRequest([1, 2, 3], max_tokens)] * num


async def test_open_loop_sends_on_time_whatever_the_answers_do(monkeypatch):
    Clock(monkeypatch)
    result = await run_load(Server(max_running=1), requests(4), [0.0, 0.5, 1.0, 1.5], None)
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    summary = summarize(result, [50], {})
    # Each is served for 1.4 s after those before it: waiting is latency.
    assert [record.ended_s for record in result.records] == pytest.approx([1.4, 2.8, 4.2, 5.6])
    assert summary.ttft_ms.mean == pytest.approx(statistics.mean([1000, 1900, 2800, 3700]))
    assert summary.e2el_ms.max == pytest.approx(4100)
    assert (summary.max_in_flight, summary.num_late) == (3, 0)


async def test_a_late_start_counts_as_latency(monkeypatch):
    Clock(monkeypatch)
    result = await run_load(Server(), requests(3), [0.0, 0.1, 0.2], max_concurrency=1)
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 1.4, 2.8])
    summary = summarize(result, [99], {})
    assert summary.num_late == 2
    assert summary.late_ms.max == pytest.approx(2600)
    assert summary.ttft_ms.max == pytest.approx(3600)
    assert summary.max_in_flight == 1


async def test_closed_loop_counts_from_the_sending(monkeypatch):
    Clock(monkeypatch)
    result = await run_load(Server(), requests(6), None, max_concurrency=2)
    assert [record.sent_s for record in result.records] == pytest.approx([0, 0, 1.4, 1.4, 2.8, 2.8])
    summary = summarize(result, [50], {})
    assert summary.ttft_ms.std == pytest.approx(0, abs=1e-6)
    assert (summary.ttft_ms.mean, summary.e2el_ms.mean) == pytest.approx((1000, 1400))
    assert (summary.tpot_ms.mean, summary.itl_ms.mean) == pytest.approx((100, 100))
    assert (summary.itl_ms.count, summary.num_late, summary.max_in_flight) == (24, 0, 2)
    assert summary.duration_s == pytest.approx(4.2)
    assert summary.output_tokens_per_s == pytest.approx(30 / 4.2)
    assert summary.total_tokens_per_s == pytest.approx((30 + 18) / 4.2)


async def test_users_go_on_until_it_is_over(monkeypatch):
    Clock(monkeypatch)
    result = await run_users(Server(), itertools.repeat(requests(1)[0]), 2, lambda now_s: now_s >= 2.0)
    assert [record.sent_s for record in result.records] == pytest.approx([0, 0, 1.4, 1.4])
    assert result.duration_s == pytest.approx(2.8)


async def test_a_request_is_given_up_so_long_after_it_was_due(monkeypatch):
    Clock(monkeypatch)
    result = await run_load(Server(max_running=1), requests(3), [0.0, 0.1, 0.2], None, timeout_s=2.0)
    assert [record.ended_s for record in result.records] == pytest.approx([1.4, 2.1, 2.2])
    assert [record.error for record in result.records] == ["", *["no whole answer within 2 s"] * 2]
    assert len(result.records[1].piece_times_s) == 0


async def test_failed_requests_are_counted_and_not_measured(monkeypatch):
    Clock(monkeypatch)
    server, seen = Server(), []
    server.errors = [EngineFailure("full"), EngineFailure("full"), EngineFailure("broken")]
    result = await run_load(server, requests(5), [0.0] * 5, None, seen.append)
    summary = summarize(result, [50], {})
    assert (summary.num_completed, summary.num_failed) == (2, 3)
    assert summary.errors == {"full": 2, "broken": 1}
    assert summary.num_output_tokens == 10
    assert len(seen) == 5


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_variation(burstiness, variation):
    times_s = draw_arrivals(20_000, 50.0, burstiness, np.random.default_rng(3))
    gaps_s = np.diff(times_s)
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05)


def test_poisson_counts_are_as_varied_as_their_mean():
    times_s = draw_arrivals(50_000, 10.0, 1.0, np.random.default_rng(5))
    counts = np.histogram(times_s, bins=np.arange(0, times_s[-1], 1.0))[0]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_arrivals_within_a_time_are_as_many_as_it_holds():
    counts = [len(draw_arrivals_within(5.0, 20.0, 1.0, np.random.default_rng(seed))) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(100, rel=0.02)
    assert np.var(counts) == pytest.approx(100, rel=0.25)  # Poisson: none is left out for being one too many
    times_s = draw_arrivals_within(5.0, 20.0, 1.0, np.random.default_rng(1))
    assert 0 < times_s[0] < times_s[-1] < 5.0
    assert len(draw_arrivals_within(0.1, 1e-6, 1.0, np.random.default_rng(1))) == 0


def test_an_infinite_rate_is_all_at_once():
    assert draw_arrivals(3, math.inf, 1.0, np.random.default_rng()).tolist() == [0, 0, 0]


def synthetic(seed, num=37):
    """Streams with random times, as records."""
    generator = np.random.default_rng(seed)
    records = []
    for _ in range(num):
        due_s = generator.uniform(0, 10)
        times = due_s + np.cumsum(generator.uniform(0.001, 0.3, generator.integers(1, 12)))
        records.append(
            RequestRecord(due_s, due_s + 0.001, times.tolist(), times[-1] + 0.01, TokenCounts(4, len(times)))
        )
    return LoadResult(records, 20.0)


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_numpy_and_means_those_of_statistics(seed):
    result = synthetic(seed)
    percentiles = [0, 12.5, 50, 90, 99, 99.9, 100]
    summary = summarize(result, percentiles, {})
    ttfts = [(r.piece_times_s[0] - r.due_s) * 1e3 for r in result.records]
    gaps = [
        (after - before) * 1e3
        for r in result.records
        for before, after in zip(r.piece_times_s, r.piece_times_s[1:], strict=False)
    ]
    tpots = [
        (r.piece_times_s[-1] - r.piece_times_s[0]) * 1e3 / (len(r.piece_times_s) - 1)
        for r in result.records
        if len(r.piece_times_s) > 1
    ]
    for found, values in ((summary.ttft_ms, ttfts), (summary.itl_ms, gaps), (summary.tpot_ms, tpots)):
        assert found.count == len(values)
        assert found.mean == pytest.approx(statistics.fmean(values))
        assert found.median == pytest.approx(statistics.median(values))
        assert found.std == pytest.approx(statistics.pstdev(values))
        assert list(found.percentiles) == ["p0", "p12.5", "p50", "p90", "p99", "p99.9", "p100"]
        assert list(found.percentiles.values()) == pytest.approx(np.percentile(values, percentiles).tolist())
    assert summary.requests_per_s == pytest.approx(37 / 20)


def test_goodput_counts_requests_within_all_limits():
    def record(ttft_s, tpot_s, num):
        times_s = [ttft_s + tpot_s * place for place in range(num)]
        return RequestRecord(0.0, 0.0, times_s, times_s[-1] if times_s else 9.0, TokenCounts(1, num))

    records = [
        record(0.1, 0.05, 5),
        record(0.6, 0.05, 5),
        record(0.1, 0.2, 5),
        record(0.1, 0, 1),
        record(0, 0, 0),
    ]
    result = LoadResult(records, 2.0)
    assert summarize(result, [], {"ttft": 500, "tpot": 100}).goodput_per_s == 1.0  # of two
    assert summarize(result, [], {"ttft": 500}).goodput_per_s == 1.5
    assert summarize(result, [], {"e2el": 350}).goodput_per_s == 1.0
    assert summarize(result, [], {}).goodput_per_s is None


def test_nothing_measured_is_zeros():
    summary = summarize(LoadResult([], 0.0), [50], {"ttft": 1})
    assert (summary.requests_per_s, summary.goodput_per_s, summary.ttft_ms.percentiles) == (0, 0, {"p50": 0})
    assert in_flight([])[1].tolist() == []
