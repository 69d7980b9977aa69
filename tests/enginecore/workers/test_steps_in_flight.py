"""How many steps the engine keeps in flight, and when it plans them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from tests.chaos.grounds.fake_time import run_in_fake_time
from triptych.types.step import StepTimings
from triptych_services.enginecore.workers.steps_in_flight import PipelineDepth, SentSteps

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


class HeldPipeline:
    """An engine and a worker in fake time. Times are in ms."""

    def __init__(self, *, delay_ms: float = 0.3, fixed: int = 0, num_stages: int = 1) -> None:
        """`delay_ms`: of the network, each way."""
        self._delay_s = delay_ms / 1e3
        self._wake = asyncio.Event()
        self.sent = SentSteps(fixed, self._wake)
        self.sent.start(4 if num_stages == 1 else num_stages + 2, num_stages)
        self._plans: asyncio.Queue[tuple[float, int]] = asyncio.Queue()
        self._results: deque[StepTimings] = deque()
        self.busy_s = self.idle_s = 0.0
        self.planned_ms: list[float] = []
        """For each step, how long before the end of what the worker was sent it was planned."""
        self._busy_until = 0.0

    async def run(
        self,
        steps_ms: Sequence[float],
        sizes: Sequence[int] | None = None,
        late_ms: Callable[[int], float] = lambda number: 0.0,
    ) -> float:
        """Run steps, and return the share of the time in which the worker waited after the first eight.

        Args:
            steps_ms: Durations.
            sizes: Tokens of each; all the same if left out.
            late_ms: Returns how long the engine is stopped after a result.
        """
        sizes = sizes or [64] * len(steps_ms)
        worker = asyncio.create_task(self._work(list(steps_ms)))
        num_sent = num_back = 0
        while num_back < len(steps_ms):
            self._wake.clear()
            while self._results:
                self.sent.pop(self._results.popleft(), time.monotonic())
                num_back += 1
                if (late_s := late_ms(num_back) / 1e3) > 0:
                    await asyncio.sleep(late_s)
            while num_sent < len(steps_ms) and self.sent.may_plan():
                self.sent.push(sizes[num_sent])
                self.planned_ms.append(1e3 * (self._busy_until - time.monotonic()))
                self._plans.put_nowait((time.monotonic() + self._delay_s, num_sent))
                num_sent += 1
            if num_back < len(steps_ms):
                await self._wake.wait()
        await worker
        return self.idle_s / max(self.idle_s + self.busy_s, 1e-9)

    async def _work(self, steps_ms: list[float]) -> None:
        for number, step_ms in enumerate(steps_ms):
            free_at = time.monotonic()
            arrives_at, _ = await self._plans.get()
            await asyncio.sleep(max(arrives_at - time.monotonic(), 0.0))
            began_at = time.monotonic()
            self._busy_until = began_at + step_ms / 1e3
            await asyncio.sleep(step_ms / 1e3)
            timings = StepTimings(forward_ns=int(step_ms * 1e6), idle_ns=int((began_at - free_at) * 1e9))
            if number >= 8:
                self.busy_s += step_ms / 1e3
                self.idle_s += began_at - free_at
            asyncio.get_running_loop().call_later(self._delay_s, self._bring, timings)

    def _bring(self, timings: StepTimings) -> None:
        self._results.append(timings)
        self._wake.set()


@pytest.mark.parametrize("step_ms", [4.0, 20.0, 50.0])
@pytest.mark.parametrize("delay_ms", [0.1, 1.0])
def test_a_step_is_planned_shortly_before_the_last_one_ends(monkeypatch, step_ms, delay_ms) -> None:
    async def work() -> None:
        pipeline = HeldPipeline(delay_ms=delay_ms)
        assert await pipeline.run([step_ms] * 64) == 0.0
        lead_ms = 2 * delay_ms + 1 + step_ms / 32
        late = pipeline.planned_ms[8:]
        assert min(late) >= 2 * delay_ms, (
            "the plan has to cross the network, and the result before it has come"
        )
        assert max(late) <= lead_ms + 1.0 + 1e-6, "a timer may fire a millisecond early"

    run_in_fake_time(monkeypatch, work)


@pytest.mark.parametrize(("step_ms", "num_steps"), [(1.5, 64), (40.0, 5)])
def test_what_is_short_or_not_known_is_planned_at_once(monkeypatch, step_ms, num_steps) -> None:
    async def work() -> None:
        pipeline = HeldPipeline(delay_ms=0.3)
        await pipeline.run([step_ms] * num_steps)
        assert min(pipeline.planned_ms[2:]) >= step_ms - 0.3 - 1e-6, "as soon as the result has come"

    run_in_fake_time(monkeypatch, work)


@pytest.mark.parametrize("options", [{"fixed": 2}, {"num_stages": 2}])
def test_with_stages_or_a_fixed_number_steps_are_planned_at_once(monkeypatch, options) -> None:
    async def work() -> None:
        pipeline = HeldPipeline(**options)
        await pipeline.run([20.0] * 32)
        assert min(pipeline.planned_ms[8:]) > 15.0

    run_in_fake_time(monkeypatch, work)


def test_a_fixed_step_in_flight_is_never_exceeded() -> None:
    sent = SentSteps(1, asyncio.Event())
    sent.start(4, 1)
    assert sent.may_plan()
    sent.push(1)
    assert not sent.may_plan()


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("num_sizes", [1, 3])
def test_the_worker_waits_little_however_durations_vary(monkeypatch, spread, num_sizes) -> None:
    """A hundredth of the time is what may be lost; a plan at once loses nothing here."""
    draw = random.Random(spread)
    sizes = [draw.choice((64, 200, 2048)[:num_sizes]) for _ in range(1000)]
    steps_ms = [20.0 * size**0.3 / 64**0.3 * draw.lognormvariate(0.0, spread) for size in sizes]

    async def work() -> None:
        assert await HeldPipeline().run(steps_ms, sizes) <= 0.01

    run_in_fake_time(monkeypatch, work)


def test_the_worker_waits_little_where_the_engine_is_often_late(monkeypatch) -> None:
    draw = random.Random(7)
    late = {number: draw.uniform(0.0, 12.0) for number in range(2000) if draw.random() < 0.5}
    turns = itertools.count()

    async def work() -> None:
        pipeline = HeldPipeline()
        end_hold = pipeline.sent._end_hold
        monkeypatch.setattr(
            pipeline.sent,
            "_end_hold",
            lambda: asyncio.get_running_loop().call_later(late.get(next(turns), 0.0) / 1e3, end_hold),
        )
        assert await pipeline.run([20.0] * 2000) <= 0.01

    run_in_fake_time(monkeypatch, work)


def test_pauses_are_forgotten(monkeypatch) -> None:
    async def work() -> None:
        pipeline = HeldPipeline()
        await pipeline.run(
            [50.0] * 300, late_ms=lambda number: 150.0 if number in range(20, 100, 10) else 0.0
        )
        assert max(pipeline.planned_ms[110:120]) < 35.0, "each of eight pauses counts a sixteenth"
        assert max(pipeline.planned_ms[-10:]) < 12.0

    run_in_fake_time(monkeypatch, work)


def test_steps_that_become_shorter_are_noticed_by_the_first(monkeypatch) -> None:
    async def work() -> None:
        pipeline = HeldPipeline()
        await pipeline.run([40.0] * 40 + [10.0] * 40)
        assert pipeline.idle_s <= 0.031, "one step is waited for"

    run_in_fake_time(monkeypatch, work)
