"""Totals since start, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounters:
    """Written by the scheduler alone; they only grow, over a loss of the worker too."""

    num_steps: int = 0
    """Planned."""
    num_scheduled_tokens: int = 0
    """Recomputed ones included."""
    prefix_queries: int = 0
    """Prompt tokens looked up, once per request."""
    prefix_hits: int = 0
    """Of those, found, and so not computed."""
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
