"""Work beside the event loop: where it runs, what bounds it, and what leaving does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.frontend import work_threads
from services.frontend.work_threads import WorkThreads
from triptych.errors import QueueFull


class Blocker:
    """Work that lasts until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.num_started = 0

    def __call__(self) -> int:
        self.num_started += 1
        assert self.released.wait(10)
        return threading.get_ident()


def start(threads: WorkThreads, blocker: Blocker, size: int = 100) -> asyncio.Task[int]:
    return asyncio.create_task(threads.run(size, blocker))


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_short_work_runs_on_the_loop_and_long_work_does_not() -> None:
    threads = WorkThreads(1, inline_size=10, what="things")
    assert await threads.run(10, threading.get_ident) == threading.get_ident()
    assert await threads.run(11, threading.get_ident) != threading.get_ident()


async def test_errors_reach_the_caller() -> None:
    threads = WorkThreads(1, inline_size=0, what="things")
    with pytest.raises(ZeroDivisionError):
        await threads.run(1, lambda: 1 // 0)
    assert await threads.run(1, int, "7") == 7


@pytest.mark.parametrize(("name", "limit"), [("MAX_WAITING", 2), ("MAX_WAITING_SIZE", 250)])
async def test_more_than_can_wait_is_refused_with_a_retry_time(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(work_threads, name, limit)
    threads, blocker = WorkThreads(1, inline_size=0, what="things"), Blocker()
    running = start(threads, blocker)
    await until(lambda: blocker.num_started)
    waiting = [start(threads, blocker) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 things wait already, 200 characters") as caught:
        await threads.run(100, int)
    assert caught.value.retry_after_s > 0
    blocker.released.set()
    await asyncio.gather(running, *waiting)
    assert await threads.run(100, int) == 0


async def test_who_leaves_while_waiting_makes_room_and_never_runs() -> None:
    threads, blocker = WorkThreads(1, inline_size=0, what="things"), Blocker()
    running = start(threads, blocker)
    await until(lambda: blocker.num_started)
    waiting = start(threads, blocker)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    blocker.released.set()
    await running
    assert blocker.num_started == 1


async def test_a_thread_is_free_only_when_its_work_has_ended_whoever_left() -> None:
    threads, blocker = WorkThreads(1, inline_size=0, what="things"), Blocker()
    left = start(threads, blocker)
    await until(lambda: blocker.num_started)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    second = start(threads, blocker)
    await asyncio.sleep(0.02)
    assert blocker.num_started == 1
    blocker.released.set()
    await second
    assert blocker.num_started == 2
