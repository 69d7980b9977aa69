"""The arithmetic of the benchmarks."""

from __future__ import annotations

import pytest

from triptych.client import stream_stats
from triptych.client.bench import Round, summarize
from triptych.client.stream_stats import StreamStats
from triptych.types.events import AdmittedEvent, DeltaEvent


def test_summary_is_the_median_of_the_rounds():
    rounds = [Round(wall_s, 100, 50, [0.1, 0.3], [0.01, 0.03]) for wall_s in (1.0, 4.0, 2.0)]
    summary = summarize(rounds)
    assert summary.output_tokens_per_s == 25.0
    assert summary.total_tokens_per_s == 75.0
    assert summary.wall_s == 2.0
    assert summary.ttft_p50_ms == pytest.approx(200.0)
    assert summary.itl_p99_ms == pytest.approx(29.8)


def test_rounds_of_one_token_have_no_gaps():
    assert summarize([Round(1.0, 1, 1, [0.1], [])]).itl_p99_ms == 0.0


def test_stream_stats_follow_the_clock(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(stream_stats.time, "perf_counter", lambda: now[0])
    stats = StreamStats(started_s=10.0)
    for at, event in (
        (10.2, AdmittedEvent("r", "m", 1, [])),
        (10.5, DeltaEvent(0, "a", [1])),
        (10.6, DeltaEvent(0, "", [])),  # text held back: no token
        (11.0, DeltaEvent(0, "b", [2])),
        (12.5, DeltaEvent(0, "cd", [3, 4, 5])),
    ):
        now[0] = at
        stats.add(event)
    assert stats.ttft_s == pytest.approx(0.5)
    assert stats.gaps_s == pytest.approx([0.5, 1.5])
    assert stats.decode_tokens_per_s == pytest.approx(4 / 2.0)
    assert str(stats) == "TTFT 500 ms, 2.0 tokens/s, 5 tokens"


def test_a_stream_without_tokens_has_zeros():
    assert (StreamStats().ttft_s, StreamStats().decode_tokens_per_s) == (0.0, 0.0)
