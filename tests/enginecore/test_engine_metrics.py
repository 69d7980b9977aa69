"""An engine's counters, as Prometheus reads them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from triptych.observe.metrics import EngineMetrics
from triptych.observe.metrics.enginecore import JOURNAL_STATES, MAX_PRIORITY_LABEL
from triptych.types.facts import EngineStatus, GroupStatus
from triptych.types.kv_transfer import TransferCounts
from triptych_services.enginecore.app import export_status

STATUS = EngineStatus("e", True, "", block_bytes=100)


class Exported:
    """The metrics after some statuses, one after the other."""

    def __init__(self, *statuses: EngineStatus) -> None:
        self._registry = CollectorRegistry()
        metrics, last = EngineMetrics.create(self._registry), None
        for status in statuses:
            last = export_status(metrics, status, last)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == f"triptych_engine_{name}"
        }


def test_waiting_requests_by_priority() -> None:
    some = replace(STATUS, num_waiting_by_priority={0: 4, -3: 1})
    found = Exported(some).by("waiting_requests_by_priority", "priority")
    assert found == {("0",): 4, ("-3",): 1}
    found = Exported(some, replace(STATUS, num_waiting_by_priority={0: 2})).by(
        "waiting_requests_by_priority", "priority"
    )
    assert found == {("0",): 2, ("-3",): 0}


def test_priorities_beyond_a_bound_share_a_series() -> None:
    most = MAX_PRIORITY_LABEL
    hostile = dict.fromkeys(range(1000), 1) | {-(1 << 31): 2, (1 << 31) - 1: 3}
    found = Exported(replace(STATUS, num_waiting_by_priority=hostile)).by(
        "waiting_requests_by_priority", "priority"
    )
    assert len(found) == most + 2
    assert found[(str(most),)] == 1000 - most + 3
    assert found[(str(-most),)] == 2


def test_transfers_of_kv_blocks() -> None:
    with_pages = replace(STATUS, page_bytes=7_000)
    first = replace(with_pages, kv_transfers=TransferCounts(1, 2, 3, 1, 4, 5, 6, 2))
    second = replace(with_pages, kv_transfers=TransferCounts(2, 2, 10, 3, 5, 5, 6, 2))
    exported = Exported(first, second)
    assert exported.by("kv_transfers_total", "direction", "outcome") == {
        ("in", "complete"): 2,
        ("in", "failed"): 2,
        ("out", "complete"): 5,
        ("out", "failed"): 5,
    }
    assert exported.by("kv_transfer_bytes_total", "direction") == {
        ("in",): 7 * 100 + 3 * 7_000,
        ("out",): 4 * 100 + 2 * 7_000,
    }


def test_blocks_by_kind_of_group() -> None:
    window = GroupStatus("window-1024", 5, 900, 60, 3, 20, 0)
    state = GroupStatus("state", 1, 30, 4, 1, 2, 7)
    first = replace(STATUS, groups=(window, state))
    exported = Exported(first, replace(first, groups=(replace(window, num_hit_blocks=8), state)))
    assert exported.by("group_used_blocks", "group") == {("window-1024",): 60, ("state",): 4}
    assert exported.by("group_blocks", "group") == {("window-1024",): 900, ("state",): 30}
    assert exported.by("group_hit_blocks_total", "group") == {("window-1024",): 8, ("state",): 1}
    assert exported.by("group_released_blocks_total", "group") == {("window-1024",): 20, ("state",): 2}
    assert exported.by("state_snapshots") == {(): 7}
    gone = Exported(first, STATUS)
    assert gone.by("group_used_blocks", "group") == {("window-1024",): 0, ("state",): 0}
    assert gone.by("state_snapshots") == {(): 0}


def test_state_of_the_journal() -> None:
    recording = replace(STATUS, journal="recording", journal_bytes=700, journal_oldest_at_ms=5_500)
    exported = Exported(recording, replace(recording, journal="failed"))
    states = {(state,): float(state == "failed") for state in JOURNAL_STATES}
    assert exported.by("journal_state", "state") == states
    assert exported.by("journal_bytes") == {(): 700}
    assert exported.by("journal_oldest_timestamp_seconds") == {(): 5.5}
