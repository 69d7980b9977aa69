"""How many steps the engine keeps in flight."""

from __future__ import annotations

import pytest

from services.enginecore.workers.steps_in_flight import PipelineDepth
from triptych.types.step import StepTimings

STEP_NS = 5_000_000


def note(
    steps_in_flight: PipelineDepth, *, idle_ns: int = 0, count: int = 16, step_ns: int = STEP_NS
) -> None:
    for _ in range(count):
        steps_in_flight.note(StepTimings(forward_ns=step_ns, idle_ns=idle_ns), 0.01, was_alone=False)


def note_alone(steps_in_flight: PipelineDepth, overhead_ms: float, step_ns: int = STEP_NS) -> None:
    steps_in_flight.note(StepTimings(forward_ns=step_ns), step_ns / 1e9 + overhead_ms / 1e3, was_alone=True)


@pytest.mark.parametrize(
    ("overhead_ms", "size"), [(0.0, 2), (0.4, 2), (4.9, 2), (5.1, 3), (9.9, 3), (10.1, 4), (100.0, 4)]
)
def test_the_first_step_tells_how_many_hide_the_network(overhead_ms, size) -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    assert steps_in_flight.size == 2
    note_alone(steps_in_flight, overhead_ms)
    assert steps_in_flight.size == size


def test_it_grows_with_idle_gaps_up_to_the_grant() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(3)
    note(steps_in_flight, idle_ns=STEP_NS // 50)
    assert steps_in_flight.size == 3
    note(steps_in_flight, idle_ns=STEP_NS // 50)
    assert steps_in_flight.size == 3


def test_a_gap_of_less_than_a_hundredth_is_tolerated() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    note(steps_in_flight, idle_ns=STEP_NS // 200, count=160)
    assert steps_in_flight.size == 2


def test_waiting_with_nothing_queued_is_no_gap() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    for _ in range(50):
        steps_in_flight.note(
            StepTimings(forward_ns=STEP_NS, idle_ns=10 * STEP_NS), STEP_NS / 1e9, was_alone=True
        )
    assert steps_in_flight.size == 2


@pytest.mark.parametrize("fixed", [1, 2, 4])
def test_what_the_operator_fixes_stays(fixed) -> None:
    steps_in_flight = PipelineDepth(fixed)
    steps_in_flight.start(4)
    note_alone(steps_in_flight, 100.0)
    note(steps_in_flight, idle_ns=STEP_NS, count=64)
    assert steps_in_flight.size == fixed


def test_another_session_starts_over() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    note_alone(steps_in_flight, 100.0)
    steps_in_flight.start(4)
    assert steps_in_flight.size == 2
    steps_in_flight.start(1)
    assert steps_in_flight.size == 1


def test_every_stage_has_a_step_and_one_waits() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(7, num_stages=4)
    assert steps_in_flight.size == 5
    steps_in_flight.start(4)
    assert steps_in_flight.size == 2
