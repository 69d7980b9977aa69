"""The worker's judgement of its own steps."""

from __future__ import annotations

import pytest

from services.worker.watchdog import StepClock, StepHung, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(hang_timeout_s: float = 30.0, average_s: float = 0.0) -> tuple[StepClock, Watchdog]:
    clock = Clock()
    steps = StepClock(clock)
    if average_s:
        steps.start(1)
        clock.now += average_s
        steps.stop()
    return steps, Watchdog(steps, hang_timeout_s=hang_timeout_s)


def num_ticks_until_hung(watchdog: Watchdog, most: int = 1000) -> int | None:
    for tick in range(most):
        try:
            watchdog.tick()
        except StepHung:
            return tick
    return None


def test_a_step_is_given_its_time_and_then_named() -> None:
    steps, watchdog = watch()
    steps.start(9)
    assert num_ticks_until_hung(watchdog) == 31  # the first tick finds it, 30 s later it is 30 s old
    with pytest.raises(StepHung, match=r"step 9 has run for 32 s, the limit is 30 s"):
        watchdog.tick()


def test_long_steps_are_given_longer() -> None:
    steps, watchdog = watch(average_s=4.0)
    steps.start(2)
    assert num_ticks_until_hung(watchdog) == 121


def test_no_step_no_judgement() -> None:
    steps, watchdog = watch()
    assert num_ticks_until_hung(watchdog) is None
    for step_id in range(100):  # each is another one
        steps.start(step_id + 1)
        watchdog.tick()
        watchdog.tick()
        steps.stop()
    assert num_ticks_until_hung(watchdog) is None
