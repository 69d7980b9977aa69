"""Every process tells its build, and the time that is left to its certificate."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from triptych.observe.metrics import BuildInfo, CertificateExpiry
from triptych.observe.metrics.process import COMMIT_ENV, process_metrics


class FromGit:
    """An installed package whose pip knows its commit."""

    version = "1.2.3"

    def __init__(self, source: str | None) -> None:
        self._source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._source


def commit_of_build() -> str:
    registry = CollectorRegistry()
    registry.register(BuildInfo("frontend"))
    (family,) = registry.collect()
    (sample,) = family.samples
    assert sample.name == "triptych_build_info"
    assert sample.value == 1
    assert sample.labels["version"] == metadata.version("triptych")
    assert sample.labels["service"] == "frontend"
    return sample.labels["commit"]


@pytest.mark.parametrize(
    ("source", "commit"),
    [
        (None, ""),
        (json.dumps({"url": "file:///src", "dir_info": {}}), ""),
        (json.dumps({"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}), "c0ffee"),
    ],
)
def test_commit_of_an_installation(source: str | None, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_ENV, raising=False)
    monkeypatch.setattr(metadata, "distribution", lambda name: FromGit(source))
    assert commit_of_build() == commit


def test_commit_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_ENV, "31f4ebc6")
    assert commit_of_build() == "31f4ebc6"


@pytest.mark.parametrize("has_certificate", [True, False])
def test_metrics_are_exported_while_the_process_serves(has_certificate: bool) -> None:
    registry = CollectorRegistry()
    with process_metrics("worker", (lambda: 0.0) if has_certificate else None, registry):
        names = {family.name for family in registry.collect()}
        assert names == {
            "triptych_build",
            *(["triptych_certificate_expiry_seconds"] if has_certificate else []),
        }
    assert not list(registry.collect())


def test_time_left_to_a_certificate() -> None:
    now, end = 1000.0, 1600.0
    registry = CollectorRegistry()
    registry.register(CertificateExpiry(lambda: end, lambda: now))

    def left_s() -> float | None:
        return registry.get_sample_value("triptych_certificate_expiry_seconds")

    assert left_s() == 600
    now = 1700.0
    assert left_s() == -100
    end = 5000.0  # it was renewed
    assert left_s() == 3300
    assert b"triptych_certificate_expiry_seconds 3300.0" in generate_latest(registry)
