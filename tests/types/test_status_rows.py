"""Each number of an engine's status is declared once, and shown wherever its row says."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from triptych.admin.v1 import admin_pb2
from triptych.cli.watch import watch
from triptych.observe.metrics import EngineGauges, EngineMetrics
from triptych.types.facts import STATUS_ROWS, EngineCounters, EngineStatus, StatusRow
from triptych.wire.admin import status_from_proto, status_to_proto
from triptych_services.enginecore.app import export_status

PROTO = Path(__file__).parents[2] / "protos/triptych/admin/v1/admin.proto"
SIZES = ("soft_num_blocks", "block_bytes", "page_bytes", "block_size")  # of the cache, which do not change
UNSENT = (
    "oldest_waiting_s",
    "journal_bytes",
    "journal_oldest_at_ms",
    "num_kept",
    "num_adapters",
    "num_resident_adapters",
    "resident_adapter_bytes",
    "num_adapter_reads",
    "num_adapter_drops",
)
each_row = pytest.mark.parametrize("name", STATUS_ROWS)


def status_of(start: int = 100) -> EngineStatus:
    """Return a status with another number at each row."""
    values: dict[str, Any] = {name: start + place for place, name in enumerate(STATUS_ROWS)}
    values["asleep"] = True
    counters = {each.name: values.pop(each.name) for each in fields(EngineCounters) if each.name in values}
    return EngineStatus("e", True, "", counters=EngineCounters(**counters), **values)


def samples_of(collector: Collector | CollectorRegistry) -> dict[str, tuple[str, float]]:
    """Return name -> help and value of each metric."""
    return {
        sample.name: (family.documentation, sample.value)
        for family in collector.collect()
        for sample in family.samples
    }


def series(prefix: str, name: str, row: StatusRow) -> str:
    return f"{prefix}{name}{'_total' if row.is_counter else ''}"


def test_every_number_has_a_row():
    numbers = {
        each.name
        for cls in (EngineStatus, EngineCounters)
        for each in fields(cls)
        if str(each.type) in ("int", "float", "int | None")
    }
    assert numbers - {*SIZES} == set(STATUS_ROWS) - {"asleep"}


@each_row
def test_proto_has_it_with_the_same_words(name):
    in_proto = {"steps_in_flight": "max_steps_in_flight"}.get(name, name)
    if name in UNSENT or name == "asleep":  # the state tells that
        assert name not in admin_pb2.EngineStatus.DESCRIPTOR.fields_by_name
        return
    (comment,) = re.findall(
        rf"  // (.*)\n  uint(?:32|64) {in_proto} = ",
        PROTO.read_text().partition("message EngineStatus {")[2].partition("\n}")[0],
    )
    assert comment == STATUS_ROWS[name].help


@each_row
def test_value_reaches_another_tier(name):
    status = status_of()
    _, read = status_from_proto(status_to_proto(replace(status, asleep=False), "m"))
    if name not in (*UNSENT, "asleep"):
        assert STATUS_ROWS[name].read(read) == STATUS_ROWS[name].read(status)


@each_row
def test_engine_and_frontends_export_it(name):
    row, before, after = STATUS_ROWS[name], status_of(), status_of(1000)
    registry = CollectorRegistry()
    metrics = EngineMetrics.create(registry)
    export_status(metrics, after, export_status(metrics, before, None))
    if row.metric:
        shown = samples_of(registry)[series("triptych_engine_", row.metric, row)]
        assert shown == (row.help, row.read(after))
    if row.shared:
        gauges = EngineGauges(lambda: [("m", after)], list)
        assert samples_of(gauges)[series("triptych_frontend_", row.shared, row)] == (
            row.help,
            row.read(after),
        )


def test_watch_shows_what_counters_with_a_heading_gained():
    lines: list[str] = []
    statuses = [status_to_proto(status_of(start), "m") for start in (100, 142)]
    watch(statuses, lambda status: "ready", lines.append)
    head, _, second = (line.split() for line in lines)
    headings = [row.heading for row in STATUS_ROWS.values() if row.heading]
    assert headings
    assert head[-len(headings) :] == headings
    assert second[-len(headings) :] == ["42"] * len(headings)
