"""Metrics that every process has."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

COMMIT_ENV = "TRIPTYCH_COMMIT"
"""The environment variable by which an image names the commit that it was built from."""

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


class BuildInfo(Collector):
    """The version of this build, for dashboards that show which builds run."""

    def __init__(self, service: str) -> None:
        """`service`: The tier that the process is of."""
        self._labels = {"version": metadata.version("triptych"), "commit": _find_commit(), "service": service}

    def collect(self) -> Iterator[Metric]:
        text = "1; version of the package, the commit that it was built from if that is known, and the tier."
        yield InfoMetricFamily("triptych_build", text, value=self._labels)


class CertificateExpiry(Collector):
    """The time that is left to the certificate which the process's servers show."""

    def __init__(
        self, expires_at_unix_s: Callable[[], float], clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            expires_at_unix_s: Returns the end of the certificate that is shown now.
            clock: Unix time in seconds.
        """
        self._expires_at_unix_s = expires_at_unix_s
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        text = "Time until the served certificate (tls.certificate) expires; below 0 it has."
        left_s = self._expires_at_unix_s() - self._clock()
        yield GaugeMetricFamily("triptych_certificate_expiry_seconds", text, value=left_s)


@contextmanager
def process_metrics(
    service: str,
    certificate_expires_at_unix_s: Callable[[], float] | None,
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[None]:
    """Export what a process says of itself while the block runs.

    Args:
        service: The tier that the process is of.
        certificate_expires_at_unix_s: As in `CertificateExpiry`. None: it serves in plain text.
    """
    collectors: list[Collector] = [BuildInfo(service)]
    if certificate_expires_at_unix_s is not None:
        collectors.append(CertificateExpiry(certificate_expires_at_unix_s))
    for collector in collectors:
        registry.register(collector)
    try:
        yield
    finally:
        for collector in collectors:
            registry.unregister(collector)


def _find_commit() -> str:
    """Return the commit of this build as its image or its installation names it. Empty: they do not."""
    if commit := os.environ.get(COMMIT_ENV):
        return commit
    source = metadata.distribution("triptych").read_text("direct_url.json")  # pip, where it installs from git
    version_control = {} if source is None else json.loads(source).get("vcs_info", {})
    return str(version_control.get("commit_id", ""))
