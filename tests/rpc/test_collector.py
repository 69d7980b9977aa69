"""Garbage is collected in full only while no request is served."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from triptych.rpc.collector import THRESHOLDS, collect_when_idle, freeze


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    freeze()
    yield
    gc.set_threshold(*before)


class Process:
    """A process that is looked at every ms."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.is_idle = False

    def look(self) -> bool:
        self.num_looks += 1
        return self.is_idle

    async def wait_looks(self, count: int = 5) -> None:
        until = self.num_looks + count
        async with asyncio.timeout(60):
            while self.num_looks < until:
                await asyncio.sleep(0.001)


@pytest.fixture
async def process() -> Iterator[Process]:  # type: ignore[misc]
    process = Process()
    task = asyncio.create_task(collect_when_idle(process.look, interval_s=0.001))
    yield process
    task.cancel()


def num_full() -> int:
    return int(gc.get_stats()[2]["collections"])


def create_objects(num_young_collections: int = 3) -> list[list[object]]:
    return [[] for _ in range(THRESHOLDS[0] * num_young_collections)]


async def test_nothing_is_collected_in_full_while_requests_are_served(process: Process) -> None:
    before = num_full()
    kept = create_objects(40)
    await process.wait_looks()
    assert num_full() == before
    assert kept


async def test_an_idle_process_collects_once_for_what_is_new(process: Process) -> None:
    before = num_full()
    kept = create_objects()
    process.is_idle = True
    await process.wait_looks()
    assert num_full() == before + 1
    await process.wait_looks(50)
    assert num_full() == before + 1
    kept += create_objects()
    await process.wait_looks()
    assert num_full() == before + 2


async def test_circles_are_freed_by_an_idle_process(process: Process) -> None:
    for _ in range(3 * THRESHOLDS[0]):
        circle: list[object] = []
        circle.append(circle)
    del circle
    process.is_idle = True
    await process.wait_looks()
    assert gc.collect() == 0


async def test_a_process_that_is_idle_at_single_looks_is_not_idle() -> None:
    looks = Process()

    def every_second_time() -> bool:
        looks.num_looks += 1
        return looks.num_looks % 2 == 0

    task = asyncio.create_task(collect_when_idle(every_second_time, interval_s=0.001))
    before = num_full()
    kept = create_objects()
    await looks.wait_looks(50)
    task.cancel()
    assert num_full() == before
    assert kept
