"""How many steps the engine keeps in flight."""

from __future__ import annotations

from collections import deque

import pytest

from triptych.types.step import StepTimings
from triptych_services.enginecore.workers.steps_in_flight import PipelineDepth

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


@pytest.mark.parametrize("fixed", [0, 2])
def test_one_pause_of_any_length_is_no_reason_to_grow(fixed) -> None:
    steps_in_flight = PipelineDepth(fixed)
    steps_in_flight.start(4)
    for _ in range(20):
        note(steps_in_flight, count=14)
        note(steps_in_flight, idle_ns=100 * STEP_NS, count=2)
    assert steps_in_flight.size == 2


def test_the_size_shrinks_after_a_burst_of_gaps() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    note(steps_in_flight, idle_ns=STEP_NS, count=32)
    assert steps_in_flight.size == 4
    note(steps_in_flight, count=64)
    assert steps_in_flight.size == 3
    note(steps_in_flight, count=64)
    assert steps_in_flight.size == 2
    note(steps_in_flight, count=1000)
    assert steps_in_flight.size == 2


def test_it_does_not_shrink_below_the_measured_need() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(8)
    note_alone(steps_in_flight, 9.9)  # two steps long
    note(steps_in_flight, idle_ns=STEP_NS, count=16)
    assert steps_in_flight.size == 4
    note(steps_in_flight, count=1000)
    assert steps_in_flight.size == 3


def test_a_pause_during_one_lone_step_is_not_taken_for_the_network() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(8)
    note_alone(steps_in_flight, 0.4)
    note_alone(steps_in_flight, 150.0)
    assert steps_in_flight.size == 2


def test_a_slower_network_is_measured_anew() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(8)
    for overhead_ms, size in ((0.4, 2), (9.9, 3)):
        for _ in range(8):
            note_alone(steps_in_flight, overhead_ms)
        assert steps_in_flight.size == size


def test_a_size_that_is_needed_is_questioned_ever_more_rarely() -> None:
    steps_in_flight = PipelineDepth(0)
    steps_in_flight.start(4)
    looks_at_size = {2: 0, 3: 0, 4: 0}
    for _ in range(1000):
        looks_at_size[steps_in_flight.size] += 1
        note(steps_in_flight, idle_ns=STEP_NS if steps_in_flight.size < 3 else 0)
    assert looks_at_size[4] == 0
    assert 5 <= looks_at_size[2] <= 25


class Pipeline:
    """An engine and a worker in simulated time: what each does when, and nothing else. All times are in ms."""

    def __init__(self, *, step_ms: float, delay_ms: float) -> None:
        """`delay_ms`: of the network, each way."""
        self.depth = PipelineDepth(0)
        self.depth.start(4)
        self._step_ms, self._delay_ms = step_ms, delay_ms
        self.now_ms = self._worker_free_ms = 0.0
        self._in_flight: deque[tuple[float, float, float, bool]] = deque()

    def run(self, until_ms: float, stops: list[tuple[float, float]]) -> None:
        """Run the engine, which does nothing during `stops` [(begin, end)]."""
        while self.now_ms < until_ms:
            while len(self._in_flight) < self.depth.size:
                self._send()
            received_ms = max(self.now_ms, self._in_flight[0][1])
            self.now_ms = next((end for begin, end in stops if begin <= received_ms < end), received_ms)
            while self._in_flight and self._in_flight[0][1] <= self.now_ms:
                sent_ms, _, idle_ms, was_alone = self._in_flight.popleft()
                timings = StepTimings(forward_ns=int(self._step_ms * 1e6), idle_ns=int(idle_ms * 1e6))
                self.depth.note(timings, (self.now_ms - sent_ms) / 1e3, was_alone=was_alone)

    def _send(self) -> None:
        arrived_ms = self.now_ms + self._delay_ms
        idle_ms = max(arrived_ms - self._worker_free_ms, 0.0)
        self._worker_free_ms = max(arrived_ms, self._worker_free_ms) + self._step_ms
        returned_ms = self._worker_free_ms + self._delay_ms
        self._in_flight.append((self.now_ms, returned_ms, idle_ms, not self._in_flight))


@pytest.mark.parametrize("step_ms", [3.0, 5.0, 17.0, 50.0])
@pytest.mark.parametrize("stop_ms", [20.0, 80.0, 150.0, 400.0])
@pytest.mark.parametrize("delay_ms", [0.2, 4.0])
def test_stops_of_the_engine_leave_the_size_as_it_was(step_ms, stop_ms, delay_ms) -> None:
    pipeline = Pipeline(step_ms=step_ms, delay_ms=delay_ms)
    pipeline.run(30_000, [])
    fresh = pipeline.depth.size
    stops = [(30_000 + 513 * count, 30_000 + 513 * count + stop_ms) for count in range(8)]
    pipeline.run(stops[-1][1], stops)
    pipeline.run(stops[-1][1] + 5_000, [])
    assert pipeline.depth.size == fresh


@pytest.mark.parametrize("step_ms", [3.0, 5.0, 17.0])
def test_a_slow_network_makes_it_grow_until_the_worker_never_waits(step_ms) -> None:
    pipeline = Pipeline(step_ms=step_ms, delay_ms=step_ms * 0.8)
    pipeline.run(3_000, [])
    assert pipeline.depth.size == 3
