"""When steps begin and end, on a clock that moves when told."""

from __future__ import annotations

import ctypes
import sys

import pytest

from tests.worker.simulated import SleepingClock, simulated_device
from triptych.config.step_times import StepTimeModel, StepWork
from triptych_services.worker.simulation.device import use_precise_sleep

WORK = StepWork(num_prefill_tokens=100, num_decode_rows=8, num_context_tokens=5000)
MODEL = StepTimeModel(base_ms=1.5, prefill_token_us=20, decode_row_us=2.5, context_token_ns=0.4)
WORK_NS = 1_500_000 + 2_000_000 + 20_000 + 2_000


def test_a_steps_time_is_the_sum_of_what_its_parts_cost():
    assert MODEL.step_ns(WORK) == WORK_NS


def test_what_the_caller_has_computed_since_the_plan_arrived_counts_in():
    clock = SleepingClock()
    arrived = clock()
    clock.now_ns += 300_000
    done = simulated_device(MODEL, clock).wait(WORK, arrived)
    assert clock.slept_ns == [WORK_NS - 300_000]
    assert done == clock() == arrived + WORK_NS


def test_a_device_that_is_faster_than_its_caller_is_not_waited_for():
    clock = SleepingClock()
    arrived = clock()
    clock.now_ns += 2 * WORK_NS
    assert simulated_device(MODEL, clock).wait(WORK, arrived) == clock() == arrived + 2 * WORK_NS
    assert clock.slept_ns == []


def test_a_late_sleep_is_taken_off_the_next_step_and_off_no_other():
    clock = SleepingClock(late_ns=[70_000])
    device = simulated_device(MODEL, clock)
    first = clock()
    for _ in range(3):
        device.wait(WORK, clock())
    assert clock.slept_ns == [WORK_NS, WORK_NS - 70_000, WORK_NS]
    assert clock() == first + 3 * WORK_NS


def test_a_machine_that_holds_its_caller_up_is_not_made_up_for():
    clock = SleepingClock(late_ns=[50_000_000])
    device = simulated_device(MODEL, clock)
    device.wait(WORK, clock())
    device.wait(WORK, clock())
    assert clock.slept_ns == [WORK_NS, WORK_NS - 200_000]


def test_the_device_stands_idle_until_a_plan_arrives():
    clock = SleepingClock()
    device = simulated_device(MODEL, clock)
    device.wait(WORK, clock())
    clock.now_ns += 9_000_000
    arrived = clock()
    assert device.wait(WORK, arrived) == arrived + WORK_NS


def test_timers_are_left_alone_where_the_system_is_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("there is no prctl"))
    use_precise_sleep()
