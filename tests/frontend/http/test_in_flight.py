"""The work of a request ends with its client, with the server, or by itself, and leaves its task as it was."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from triptych.errors import EngineUnavailable
from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.state import InFlight


class Client:
    """A connection that says nothing until it is left."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Work that runs until it is cancelled, or `ends` is set."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> str:
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            await asyncio.sleep(0)  # cleaning up takes a turn
            raise
        return "done"


def is_untouched() -> bool:
    """Return whether no cancellation of the test's own task is pending."""
    task = asyncio.current_task()
    assert task is not None
    return not task.cancelling()


async def test_work_returns_its_result() -> None:
    work, in_flight = Work(), InFlight()
    asyncio.get_running_loop().call_soon(work.ends.set)
    assert await in_flight.run(Client().receive, work.run()) == "done"
    assert in_flight.end_all() == 0


async def test_work_ends_with_its_client() -> None:
    work, client = Work(), Client()
    asyncio.get_running_loop().call_soon(client.has_left.set)
    with pytest.raises(ClientGone):
        await InFlight().run(client.receive, work.run())
    assert work.was_cancelled
    assert is_untouched()
    async with asyncio.timeout(30):  # as later code of the task would: it counts requests to cancel
        await asyncio.sleep(0)


async def test_work_ends_with_the_server_although_its_client_leaves_then() -> None:
    work, client, in_flight = Work(), Client(), InFlight()
    loop = asyncio.get_running_loop()
    ended: list[int] = []
    loop.call_soon(lambda: ended.append(in_flight.end_all()))
    loop.call_soon(client.has_left.set)
    with pytest.raises(EngineUnavailable, match="stopping"):
        await in_flight.run(client.receive, work.run())
    assert ended == [1]
    assert work.was_cancelled
    assert is_untouched()
    with pytest.raises(EngineUnavailable, match="stopping"):
        await in_flight.run(client.receive, work.run())


async def test_an_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await InFlight().run(Client().receive, fail())


async def test_who_cancels_the_request_itself_sees_it_cancelled() -> None:
    work = Work()
    request = asyncio.create_task(InFlight().run(Client().receive, work.run()))
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert work.was_cancelled
    assert request.cancelled()


async def test_a_client_that_leaves_with_the_result_ends_nothing_later() -> None:
    work, client = Work(), Client()
    loop = asyncio.get_running_loop()
    loop.call_soon(work.ends.set)
    loop.call_soon(client.has_left.set)
    assert await InFlight().run(client.receive, work.run()) == "done"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert is_untouched()


async def test_a_request_may_have_work_twice() -> None:
    client, in_flight, loop = Client(), InFlight(), asyncio.get_running_loop()
    for _ in range(2):
        work = Work()
        loop.call_later(0.01, work.ends.set)  # some turns of the loop, in which the watcher before ends
        assert await in_flight.run(client.receive, work.run()) == "done"
    assert is_untouched()
