"""Carries an engine's counters into Prometheus, once a second and never on the step's path."""

from __future__ import annotations

from triptych.observe.metrics import EngineMetrics
from triptych.types.facts import EngineStatus


def export_status(metrics: EngineMetrics, status: EngineStatus, last: EngineStatus | None) -> EngineStatus:
    """Set the gauges, advance the counters by what has happened since `last`; returns `status`."""
    metrics.running.set(status.num_running)
    metrics.waiting.set(status.num_waiting)
    metrics.used_blocks.set(status.num_used_blocks)
    metrics.blocks.set(status.num_blocks)
    metrics.asleep.set(status.asleep)
    for counter, name in (
        (metrics.steps, "num_steps"),
        (metrics.scheduled_tokens, "num_scheduled_tokens"),
        (metrics.preemptions, "num_preemptions"),
        (metrics.prefix_queries, "prefix_queries"),
        (metrics.prefix_hits, "prefix_hits"),
    ):
        counter.inc(getattr(status, name) - (getattr(last, name) if last else 0))
    for reason, count in status.num_finished.items():
        metrics.finished.labels(reason).inc(count - (last.num_finished.get(reason, 0) if last else 0))
    return status
