"""Two processes' ends and a supervisor's hub in this process, over real pairs of sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.helpers.fake_engine import eventually
from triptych.errors import DuplicateRequest, EngineUnavailable, NotKept, RateLimited
from triptych.types.submit import RequestHead
from triptych_services.frontend.access.caller import ANYONE, Caller
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.siblings import hub as hub_module
from triptych_services.frontend.siblings import siblings as siblings_module
from triptych_services.frontend.siblings.hub import Hub
from triptych_services.frontend.siblings.link import Place
from triptych_services.frontend.siblings.siblings import SharedRateLimits, Siblings, SummedMetrics


class Host:
    """A hub and the processes that it links."""

    def __init__(self, count: int) -> None:
        self.hub = Hub(count)
        self.siblings: list[Siblings] = []
        self._tasks: list[tuple[asyncio.Task[None], asyncio.Task[None]]] = []
        for index in range(count):
            ours, theirs = socket.socketpair()
            self.siblings.append(Siblings(Place(theirs.detach(), index, count, False)))
            link = self.hub.create_link(index)
            self._tasks.append(
                (asyncio.create_task(link.run(ours)), asyncio.create_task(self.siblings[index].run()))
            )

    async def kill(self, index: int) -> None:
        self._tasks[index][1].cancel()
        await self._tasks[index][0]
        self.hub.remove(index)

    async def close(self) -> None:
        tasks = [task for pair in self._tasks for task in pair]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def host(count: int = 2) -> AsyncIterator[Host]:
    host = Host(count)
    await asyncio.sleep(0.01)  # their ends are open
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def joined(count: int = 2) -> AsyncIterator[Host]:
    async with host(count) as found:
        for sibling in found.siblings:
            sibling.join()
        await eventually(lambda: found.hub.has_started)
        yield found


async def some_turns() -> None:
    """Let messages arrive that are on their way, each of which takes a few turns of the loop, however slow it is."""
    for _ in range(30):
        await asyncio.sleep(0.001)


def grpc_request(request_id: str = "r", **fields: Any) -> RawRequest:
    return RawRequest(api="grpc", prompt="Hi", head=RequestHead(request_id), **fields)


async def test_all_others_are_asked_and_the_dead_are_not() -> None:
    async with joined(3) as found:
        for index, sibling in enumerate(found.siblings):
            sibling.answer("add", lambda number, index=index: number + index)
        assert sorted(await found.siblings[0].ask_others("add", 10)) == [11, 12]
        assert sorted(await found.siblings[2].ask_others("add", 10)) == [10, 11]
        await found.kill(1)
        assert await found.siblings[0].ask_others("add", 10) == [12]


async def test_a_supervisor_that_does_not_answer_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings_module, "SUPERVISOR_S", 0.05)
    async with joined() as found:
        claim, answers = found.hub._calls["claim"], list[Any]()

        async def hang(index: int, *arguments: Any) -> Any:
            await asyncio.sleep(0.1)
            answers.append(claim(index, *arguments))
            return answers[-1]

        found.hub._calls["claim"] = hang
        found.hub._calls["admit"] = lambda index, caller: asyncio.sleep(0.1)
        with pytest.raises(EngineUnavailable, match=r"has not answered claim within 0\.05 s; try again"):
            await found.siblings[0].claim_or_find(ANYONE, grpc_request())
        with pytest.raises(EngineUnavailable, match="has not answered admit within"):
            await found.siblings[0].admit("admit", replace(ANYONE, requests_per_minute=1))
        await eventually(lambda: None in answers and not found.hub._holders)  # the late answer is given back
    with pytest.raises(EngineUnavailable, match="has not answered claim"):
        await found.siblings[0].claim_or_find(ANYONE, grpc_request("another"))


async def test_one_that_dies_or_is_silent_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async with joined(3) as found:
        for sibling in found.siblings[1:]:
            sibling.answer("wait", wait)
        asking = asyncio.create_task(found.siblings[0].ask_others("wait"))
        await asyncio.sleep(0.01)
        await found.kill(1)
        await found.kill(2)
        assert await asking == []
    async with joined() as found:
        monkeypatch.setattr(hub_module, "ANSWER_S", 0.05)
        found.siblings[1].answer("wait", wait)
        with pytest.raises(EngineUnavailable, match="frontend/1: no answer within"):
            await found.siblings[0].ask_others("wait")


async def test_they_are_ready_when_all_are() -> None:
    async with host() as found:
        one, other = found.siblings
        changes: list[bool] = []
        one.on_ready_changed = lambda: changes.append(one.are_ready)
        one.say_ready(True)
        one.join()
        await asyncio.sleep(0.02)
        assert not one.are_ready, "the other one has not even begun"
        other.join()
        other.say_ready(True)
        await eventually(lambda: one.are_ready and other.are_ready)
        for _ in range(3):
            other.say_ready(True)  # nothing changes, nothing is said
        other.say_ready(False)
        await eventually(lambda: not one.are_ready)
        await found.kill(1)
        await eventually(lambda: one.are_ready), "one that is dead is not waited for"
        assert len(changes) < 8


async def test_an_id_is_held_by_one_request() -> None:
    async with joined() as found:
        one, other = found.siblings
        raw = grpc_request(client_names=("mine",), sampling={"temperature": 0.5})
        for sibling in found.siblings:
            sibling.answer("token_of_duplicate", lambda caller, sent: "token" if sent == raw else "")
        assert await one.claim_or_find(ANYONE, raw) == ""
        assert await other.claim_or_find(ANYONE, raw) == "token", "the same goes on where it is alive"
        with pytest.raises(DuplicateRequest, match="'r' is alive"):
            await other.claim_or_find(ANYONE, replace(raw, prompt="Bye"))
        assert await other.claim_or_find(ANYONE, replace(raw, head=RequestHead("r", 0, "tenant"))) == ""
        other.claim_again(raw)  # a stream goes on there, and its first call ends
        one.release(raw)
        with pytest.raises(DuplicateRequest):
            await one.claim_or_find(ANYONE, replace(raw, prompt="Bye"))
        await found.kill(1)
        assert await one.claim_or_find(ANYONE, raw) == ""


async def test_an_id_is_free_when_its_request_has_ended() -> None:
    """Its client may send the id again at once, to another process than the one that has told it of the end."""
    async with joined() as found:
        one, other = found.siblings
        raw = grpc_request()

        def end(caller: Caller, sent: RawRequest) -> None:
            one.release(raw)

        one.answer("token_of_duplicate", end)
        assert await one.claim_or_find(ANYONE, raw) == ""
        assert await other.claim_or_find(ANYONE, raw) == ""
        # one that holds an id and knows no such request, as while its claim is on the way
        other.answer("token_of_duplicate", lambda caller, sent: None)
        with pytest.raises(DuplicateRequest, match="'r' is alive"):
            await one.claim_or_find(ANYONE, raw)


async def test_a_client_that_leaves_while_its_id_is_asked_for_holds_nothing() -> None:
    async with joined() as found:
        one, other = found.siblings
        asking = asyncio.create_task(one.claim_or_find(ANYONE, grpc_request()))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await some_turns()
        assert await other.claim_or_find(ANYONE, grpc_request()) == ""


async def test_limits_are_counted_once_for_all() -> None:
    async with joined() as found:
        refused: list[tuple[str, str]] = []
        one, other = (
            SharedRateLimits(sibling, lambda caller, unit: refused.append((caller.name, unit)))
            for sibling in found.siblings
        )
        few, tokens = Caller("few", requests_per_minute=3), Caller("tokens", tokens_per_minute=5)
        for limits in (one, other, one):
            await limits.admit(few)
        for limits in (one, other):
            with pytest.raises(RateLimited, match="3 requests within a minute, the limit is 3") as error:
                await limits.admit(few)
            assert 0 < error.value.retry_after_s <= 60
        one.charge(tokens, 5)
        with pytest.raises(RateLimited, match="5 tokens"):
            await one.admit_tokens(tokens)
        guesser = Caller("guesser", requests_per_minute=1)
        with pytest.raises(NotKept):
            async with one.guess(guesser):
                raise NotKept("made up")
        await some_turns()
        with pytest.raises(RateLimited, match="1 streams that are not kept"):
            async with other.guess(guesser):
                pass
        await found.kill(0)
        with pytest.raises(RateLimited):
            await other.admit(few)
        assert refused == [
            ("few", "requests"),
            ("few", "requests"),
            ("tokens", "tokens"),
            ("guesser", "streams that are not kept"),
            ("few", "requests"),
        ]


def test_metrics_are_summed_where_they_are_counts() -> None:
    def process(number: int) -> CollectorRegistry:
        registry = CollectorRegistry()
        requests = Counter("requests", "Some.", ["model"], registry=registry)
        requests.labels("both").inc(number)
        requests.labels(f"only-{number}").inc()
        Gauge("oldest_waiting", "Some.", registry=registry)
        Gauge("the_oldest_seconds", "Some.", registry=registry).set(number)
        Gauge("active", "Some.", registry=registry).set(number)
        Histogram("seconds", "Some.", buckets=(1, 2), registry=registry).observe(number)
        if number == 2:
            Counter("late", "Some.", registry=registry).inc(7)
        return registry

    own, others = process(1), [list(process(2).collect()), list(process(3).collect())]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in SummedMetrics(own, others).collect()
        for sample in metric.samples
    }
    assert found["requests_total", "both"] == 6
    assert [found["requests_total", f"only-{number}"] for number in (1, 2, 3)] == [1, 1, 1]
    assert (found["active",], found["the_oldest_seconds",], found["late_total",]) == (6, 3, 7)
    assert [found["seconds_bucket", bound] for bound in ("1.0", "2.0", "+Inf")] == [1, 2, 3]
    assert (found["seconds_count",], found["seconds_sum",]) == (3, 6)
    again = {sample.name: sample.value for metric in own.collect() for sample in metric.samples}
    assert again["active"] == 1, "a scrape changes nothing"
