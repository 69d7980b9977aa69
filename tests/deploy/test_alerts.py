"""Alerts, and the table of metrics for operators, name what the processes export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.deploy.facts import ROOT
from triptych.observe.metrics import (
    ChildMetrics,
    ChoiceGauges,
    EngineGauges,
    EngineMetrics,
    ExpertChoices,
    FrontendMetrics,
    LoopLag,
    WorkerMetrics,
)
from triptych.observe.metrics.enginecore import JOURNAL_STATES
from triptych.observe.metrics.process import process_metrics

FOLDER = ROOT / "deploy/prometheus"
SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "info": ["_info"],
    "histogram": ["_bucket", "_sum", "_count"],
}
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of all series that a process may export."""
    registry = CollectorRegistry()
    for tier in (FrontendMetrics, EngineMetrics, WorkerMetrics):
        tier.create(registry)
    LoopLag(registry)
    ExpertChoices(lambda: ({0: [1]}, 1), registry)
    for collector in (EngineGauges(list, list), ChoiceGauges(dict), ChildMetrics(dict)):
        registry.register(collector)
    with process_metrics("frontend", lambda: 0.0, registry):
        families = list(registry.collect())
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def names_in(text: str) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"\btriptych_[a-z_]+", text))


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_looks_at_series_that_there_are(rule: dict[str, Any], exported: set[str]) -> None:
    names = set(names_in(rule["expr"]))
    assert names
    assert names <= exported
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) >= 10


def test_states_of_the_journal_that_alert_are_states() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "TriptychJournalStopped"]
    (states,) = re.findall(r'state=~"([a-z|]+)"', rule["expr"])
    assert set(states.split("|")) < set(JOURNAL_STATES)


def test_prometheus_loads_the_alerts_where_they_are_mounted() -> None:
    (name,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = {mount["target"]: mount["source"] for mount in compose["services"]["prometheus"]["configs"]}
    file = compose["configs"][mounts[f"/etc/prometheus/{name}"]]["file"]
    assert (ROOT / file).resolve() == FOLDER / name


def test_the_table_for_operators_names_series_that_there_are(exported: set[str]) -> None:
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    text = (ROOT / "docs/operations/observe.md").read_text()
    section = text[text.index("## Metrics\n") : text.index("## The step journal\n")]
    assert set(names_in(section)) <= exported | histograms
