"""The times of a streamed answer that the command line prints."""

from __future__ import annotations

import pytest

from triptych.cli import streaming
from triptych.cli.streaming import StreamStats
from triptych.types.events import AdmittedEvent, DeltaEvent


def test_stream_stats_follow_the_clock(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now[0])
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
    assert stats.decode_tokens_per_s == pytest.approx(4 / 2.0)
    assert str(stats) == "TTFT 500 ms, 2.0 tokens/s, 5 tokens"


def test_a_stream_without_tokens_has_zeros():
    assert (StreamStats().ttft_s, StreamStats().decode_tokens_per_s) == (0.0, 0.0)
