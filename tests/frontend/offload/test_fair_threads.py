"""Work beside the event loop: where it runs, whose turn it is, what bounds it, and what leaving does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from triptych.errors import QueueFull
from triptych_services.frontend.access.caller import Caller, current_payer, set_caller, set_tenant
from triptych_services.frontend.offload import fair_threads
from triptych_services.frontend.offload.fair_threads import FairThreads, add_cpu_time

T = TypeVar("T")


class Blocker:
    """Work that lasts until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.num_started = 0

    def __call__(self) -> int:
        self.num_started += 1
        assert self.released.wait(60)
        return threading.get_ident()


def start(threads: FairThreads, call: Callable[[], T], size: int = 100, tenant: str = "") -> asyncio.Task[T]:
    async def run() -> T:
        set_tenant(tenant)
        return await threads.run(size, call)

    return asyncio.create_task(run())


def burn(cpu_s: float) -> None:
    """Use CPU time, however busy the machine is."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_short_work_runs_on_the_loop_and_long_work_does_not() -> None:
    threads = FairThreads(1, inline_size=10, what="things")
    assert await threads.run(10, threading.get_ident) == threading.get_ident()
    assert await threads.run(11, threading.get_ident) != threading.get_ident()


async def test_errors_reach_the_caller() -> None:
    threads = FairThreads(1, inline_size=0, what="things")
    with pytest.raises(ZeroDivisionError):
        await threads.run(1, lambda: 1 // 0)
    assert await threads.run(1, int, "7") == 7


@pytest.mark.parametrize(("max_waiting", "max_size"), [(2, 10_000), (9, 250)])
async def test_more_than_can_wait_is_refused_with_a_retry_time(
    monkeypatch: pytest.MonkeyPatch, max_waiting: int, max_size: int
) -> None:
    monkeypatch.setattr(fair_threads, "MAX_WAITING_SIZE", max_size)
    threads, blocker = FairThreads(1, inline_size=0, what="things", max_waiting=max_waiting), Blocker()
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
    threads, blocker = FairThreads(1, inline_size=0, what="things"), Blocker()
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
    threads, blocker = FairThreads(1, inline_size=0, what="things"), Blocker()
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


async def test_payers_are_served_in_turn_by_the_time_that_they_have_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = 0.0
    monkeypatch.setattr(fair_threads.time, "thread_time", lambda: used_s)
    threads, blocker, order = FairThreads(1, inline_size=0, what="things"), Blocker(), list[str]()

    def note(name: str, cpu_s: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal used_s
            order.append(name)
            used_s += cpu_s

        return call

    running = start(threads, blocker, tenant="first")
    await until(lambda: blocker.num_started)
    heavy = [start(threads, note("heavy", 0.05), tenant="heavy") for _ in range(4)]
    await asyncio.sleep(0)
    light = [start(threads, note("light", 0.01), tenant="light") for _ in range(4)]
    await asyncio.sleep(0)
    blocker.released.set()
    await asyncio.gather(running, *heavy, *light)
    assert order == ["heavy", *["light"] * 4, "heavy", "heavy", "heavy"]


async def test_time_in_another_process_counts() -> None:
    threads, blocker, order = FairThreads(1, inline_size=0, what="things"), Blocker(), list[str]()
    running = start(threads, blocker, tenant="first")
    await until(lambda: blocker.num_started)

    def elsewhere() -> None:
        order.append("elsewhere")
        add_cpu_time(100.0)

    tasks = [start(threads, elsewhere, tenant="a") for _ in range(2)]
    await asyncio.sleep(0)
    tasks.append(start(threads, lambda: order.append("b"), tenant="b"))
    tasks.append(start(threads, lambda: order.append("b"), tenant="b"))
    await asyncio.sleep(0)
    blocker.released.set()
    await asyncio.gather(running, *tasks)
    assert order == ["elsewhere", "b", "b", "elsewhere"]


async def test_one_payer_leaves_a_thread_to_others() -> None:
    threads, blocker = FairThreads(3, inline_size=0, what="things"), Blocker()
    flood = [start(threads, blocker, tenant="flood") for _ in range(9)]
    await until(lambda: blocker.num_started == 2)
    assert await start(threads, lambda: 7, tenant="other") == 7
    assert blocker.num_started == 2
    blocker.released.set()
    await asyncio.gather(*flood)


async def test_payer_who_was_away_has_no_credit() -> None:
    threads = FairThreads(1, inline_size=0, what="things")
    first, second = Blocker(), Blocker()
    busy = [start(threads, lambda: burn(0.1), tenant="busy"), start(threads, first, tenant="busy")]
    await until(lambda: first.num_started)
    used_s = threads.cpu_s("busy")
    assert used_s > 0.05
    new = start(threads, second, tenant="new")
    await asyncio.sleep(0)
    assert threads.cpu_s("new") == used_s
    first.released.set()
    second.released.set()
    await asyncio.gather(*busy, new)
    assert threads.cpu_s("busy") == 0, "all are forgotten where nothing is to be compared"


async def test_fullest_payer_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "PAYERS_WITHIN_TOTAL", 1)
    threads, blocker = FairThreads(1, inline_size=0, what="things", max_waiting=4), Blocker()
    running = start(threads, blocker, tenant="x")
    await until(lambda: blocker.num_started)
    flood = [start(threads, blocker, tenant="flood") for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await start(threads, blocker, tenant="flood")
    others = [start(threads, lambda: 7, tenant="other") for _ in range(2)]
    await asyncio.gather(*flood[2:], return_exceptions=True)
    assert [task.done() for task in flood] == [False, False, True, True], "the latest are dropped"
    with pytest.raises(QueueFull, match="4 things wait already"):
        await start(threads, lambda: 7, tenant="other")
    blocker.released.set()
    assert await asyncio.gather(*others) == [7, 7]
    await asyncio.gather(running, *flood[:2])
    with pytest.raises(QueueFull):
        await flood[3]


async def test_work_whose_caller_has_just_left_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "PAYERS_WITHIN_TOTAL", 1)
    threads, blocker = FairThreads(1, inline_size=0, what="things", max_waiting=2), Blocker()
    running = start(threads, blocker)
    await until(lambda: blocker.num_started)
    flood = [start(threads, blocker, tenant="flood") for _ in range(2)]
    await asyncio.sleep(0)
    other = start(threads, lambda: 7, tenant="other")
    flood[1].cancel()  # it learns of that behind the other one
    blocker.released.set()
    assert await other == 7
    await asyncio.gather(running, flood[0])
    with pytest.raises(asyncio.CancelledError):
        await flood[1]


@pytest.mark.parametrize(
    ("caller", "tenant", "payer"),
    [
        (Caller("k", "acme"), "other", "acme"),
        (Caller("gateway", None), "acme", "acme"),
        (Caller("gateway", None), "", "key gateway"),
        (Caller(), "", "key "),
    ],
)
async def test_tenant_pays(caller: Caller, tenant: str, payer: str) -> None:
    set_caller(caller)
    set_tenant(tenant)
    assert current_payer() == payer
