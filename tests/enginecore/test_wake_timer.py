"""The engine loop's timer: one look after turns, and then only when something comes due."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from tests.chaos.grounds.fake_time import in_fake_time
from triptych_services.enginecore import wake_timer
from triptych_services.enginecore.wake_timer import WakeTimer

DEADLINE_S = 20.0
MANY_TICKS_S = 0.2


class Engine:
    """Something that comes due when the test says, and counts how often it is asked."""

    def __init__(self) -> None:
        self.due_at = math.inf
        self.num_looks = 0
        self.wake = asyncio.Event()
        self.timer = WakeTimer(self.wake, self.look)

    def look(self) -> float:
        self.num_looks += 1
        return self.due_at

    async def turn(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.wake.wait()
        self.wake.clear()
        self.timer.note_turn()


@pytest.fixture(autouse=True)
def short_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_timer, "TICK_S", 0.01)


@in_fake_time
async def test_turns_that_follow_each_other_share_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_timer, "TICK_S", 0.1)
    engine = Engine()
    for _ in range(100):
        engine.timer.note_turn()
    await asyncio.sleep(3 * wake_timer.TICK_S)
    assert engine.num_looks == 1
    assert not engine.wake.is_set()


@in_fake_time
async def test_nothing_due_is_looked_for_no_more_until_the_next_turn() -> None:
    engine = Engine()
    for num_turns in (1, 2):
        engine.timer.note_turn()
        await asyncio.sleep(MANY_TICKS_S)
        assert engine.num_looks == num_turns


@in_fake_time
async def test_something_due_later_wakes_then_and_not_before() -> None:
    engine = Engine()
    engine.due_at = time.monotonic() + MANY_TICKS_S
    engine.timer.note_turn()
    await engine.turn()
    assert time.monotonic() >= engine.due_at
    assert engine.num_looks <= 4, "one after the turn, one when it is due, and one where a timer is early"


@in_fake_time
async def test_what_stays_due_wakes_each_tick() -> None:
    engine = Engine()
    engine.due_at = time.monotonic()
    engine.timer.note_turn()
    for _ in range(3):
        await engine.turn()
    assert engine.num_looks == 3


@in_fake_time
async def test_a_turn_looks_before_the_time_that_was_found() -> None:
    engine = Engine()
    engine.due_at = time.monotonic() + 1000 * DEADLINE_S
    engine.timer.note_turn()
    await asyncio.sleep(MANY_TICKS_S)
    assert engine.num_looks == 1
    engine.due_at = time.monotonic()
    engine.timer.note_turn()
    await engine.turn()


@in_fake_time
async def test_a_timer_that_was_stopped_looks_no_more() -> None:
    engine = Engine()
    engine.timer.note_turn()
    engine.timer.stop()
    await asyncio.sleep(MANY_TICKS_S)
    assert engine.num_looks == 0
