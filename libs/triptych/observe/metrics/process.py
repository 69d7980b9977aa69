"""Metrics that every process has."""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY, CollectorRegistry, Histogram

_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LAG_INTERVAL_S = 0.5


class LoopLag:
    """Measures how late a timer of the event loop fires. Owned by the service, which runs `run` while it serves."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._lag = Histogram(
            "triptych_event_loop_lag_seconds",
            "Lateness of a timer, twice a second: everything on the loop waits for so long.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag.observe(max(loop.time() - due_at, 0.0))
