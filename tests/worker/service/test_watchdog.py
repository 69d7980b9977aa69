"""The worker's judgement of its own steps."""

from __future__ import annotations

import pytest

from triptych_services.worker.service.watchdog import StepClock, StepHung, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(
    hang_timeout_s: float = 30.0, measured: dict[int, float] | None = None
) -> tuple[StepClock, Watchdog]:
    """`measured`: number of tokens to seconds of the steps before."""
    clock = Clock()
    steps = StepClock(clock)
    for num_tokens, seconds in (measured or {}).items():
        steps.start(1, num_tokens)
        clock.now += seconds
        steps.stop()
    return steps, Watchdog(steps, hang_timeout_s=hang_timeout_s)


def num_ticks_until_hung(watchdog: Watchdog, most: int = 10_000) -> int | None:
    for tick in range(most):
        try:
            watchdog.tick()
        except StepHung:
            return tick
    return None


def test_a_step_is_given_its_time_and_then_named() -> None:
    steps, watchdog = watch()
    steps.start(9, 1)
    assert num_ticks_until_hung(watchdog) == 31  # the first tick finds it, 30 s later it is 30 s old
    with pytest.raises(StepHung, match=r"step 9 has run for 32 s, the limit is 30 s .* of 1 tokens"):
        watchdog.tick()


@pytest.mark.parametrize(
    ("measured", "num_tokens", "limit_s"),
    [
        ({}, 16, 30),
        ({}, 2048, 1024),  # the first step of all: two tokens a second
        ({1: 0.1}, 1, 30),
        ({1: 4.0}, 1, 120),
        ({1: 0.25}, 2048, 1024),  # the first prompt: at most what as many decodes take, twice
        ({2048: 80.0, 1: 0.25}, 1, 30),  # long steps say nothing of short ones
        ({1: 0.25, 2048: 80.0}, 2000, 2400),
        ({1: 0.25, 2048: 80.0}, 512, 2400),
        ({1: 0.01, 64: 0.02}, 128, 30),
    ],
)
def test_a_step_is_given_what_its_size_may_take(measured, num_tokens, limit_s) -> None:
    steps, watchdog = watch(measured=measured)
    steps.start(2, num_tokens)
    assert num_ticks_until_hung(watchdog) == limit_s + 1


def test_no_step_no_judgement() -> None:
    steps, watchdog = watch()
    assert num_ticks_until_hung(watchdog) is None
    for step_id in range(100):  # each is another one
        steps.start(step_id + 1, 1)
        watchdog.tick()
        watchdog.tick()
        steps.stop()
    assert num_ticks_until_hung(watchdog) is None


def test_step_1_of_another_session_is_another_step() -> None:
    steps, watchdog = watch()
    for _ in range(100):
        steps.start(1, 1)
        watchdog.tick()
        steps.abandon()
    steps.start(1, 1)
    assert num_ticks_until_hung(watchdog) == 31


def test_a_step_that_is_abandoned_is_not_measured() -> None:
    steps, watchdog = watch()
    steps.start(1, 2048)
    steps.abandon()
    steps.start(1, 2048)
    assert num_ticks_until_hung(watchdog) == 1025
