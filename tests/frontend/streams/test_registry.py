"""A frontend that leaves hands its streams over: two frontends, a real engine, a naive worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from tests.frontend.streams.test_placement import (
    PROMPT,
    Chunks,
    Seen,
    Stand,
    never,
    read,
    read_lines,
    request,
    stand,
    stream,
    unbroken,
)
from tests.helpers.fake_engine import eventually
from tests.helpers.frontend import FrontendCore
from tests.helpers.http_api import open_api
from triptych import errors
from triptych_services.frontend.streams.outputs import HandedOver
from triptych_services.frontend.streams.resume import ResumeToken

LONG_S = 60.0
"""Longer than any test: what waits for it hangs."""


async def know_each_other(s: Stand) -> None:
    """Wait until each frontend knows that the engine has the other one."""
    engines = [engine for core in (s.first, s.second) for engine in core.router.engines]
    await eventually(lambda: all(engine.num_other_frontends == 1 for engine in engines))


def engine_of(core: FrontendCore) -> Any:
    return core.router.engines[0]


async def begin(
    core: FrontendCore, seen: Seen, num_deltas: int = 2, **fields: Any
) -> AsyncGenerator[Any, None]:
    """Start a stream whose client has so many deltas."""
    events = core.generator.generate(request(**fields))
    await read(events, seen, lambda seen: bool(seen.token) and seen.num_deltas >= num_deltas)
    return events


async def go_on(core: FrontendCore, seen: Seen) -> None:
    rest = core.generator.attach(ResumeToken.parse(seen.token), seen.position, "grpc")
    async with aclosing(rest):
        await read(rest, seen, never)


@pytest.mark.parametrize("shape", [{}, {"n": 3}, {"frequency_penalty": 0.7}])
async def test_streams_go_on_at_another_frontend_at_once(shape: dict[str, Any]) -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request(sampling=shape))
        await know_each_other(s)
        seen = Seen()
        events = await begin(s.first, seen, sampling=shape, resumes=True)
        s.runner.may_step.clear()
        async with asyncio.timeout(LONG_S / 2):
            draining = asyncio.create_task(s.first.generator.drain(LONG_S))
            with pytest.raises(HandedOver):
                await read(events, seen, never)
            assert await draining == 0
        s.runner.may_step.set()
        await go_on(s.second, seen)
        assert seen.outcome == whole.outcome
        assert s.first.count("handed_over") == 0, "of this api"
        assert s.first.metric("requests_total", outcome="handed_over") == 1
        s.check_idle()


async def test_a_frontend_without_streams_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.frontend.streams.registry._KNOWN_S", LONG_S)
    async with stand() as s:
        await know_each_other(s)
        started = time.monotonic()
        assert await s.first.generator.drain(LONG_S) == 0
        assert time.monotonic() - started < LONG_S / 2  # before, it kept the event loop for all of it


async def test_streams_of_clients_that_do_not_resume_are_served_to_their_end() -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request())
        await know_each_other(s)
        seen = Seen()
        events = await begin(s.first, seen)
        s.runner.may_step.clear()
        draining = asyncio.create_task(s.first.generator.drain(LONG_S))
        await eventually(lambda: engine_of(s.second).num_other_frontends == 0)
        s.runner.may_step.set()
        await read(events, seen, never)
        assert await draining == 0
        assert seen.outcome == whole.outcome


async def test_streams_stay_where_there_is_no_other_frontend() -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request())
        await know_each_other(s)
        seen = Seen()
        events = await begin(s.first, seen, resumes=True)
        s.runner.may_step.clear()
        draining = [asyncio.create_task(core.generator.drain(LONG_S)) for core in (s.second, s.first)]
        cores = (s.first, s.second)
        await eventually(
            lambda: all(not core.generator.is_ready and engine_of(core).knows_state for core in cores)
        )
        s.runner.may_step.set()
        await read(events, seen, never)  # both leave, and neither hands over to the other
        assert await asyncio.gather(*draining) == [0, 0]
        assert seen.outcome == whole.outcome


@pytest.mark.parametrize("resumes", [True, False])
async def test_what_outlasts_the_drain_is_kept(resumes: bool) -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request())
        await know_each_other(s)
        s.second.router.say_takes_streams(False)  # none that could take it now
        await eventually(lambda: engine_of(s.first).num_other_frontends == 0)
        seen = Seen()
        s.runner.may_step.clear()
        events = await begin(s.first, seen, num_deltas=0, resumes=resumes)
        assert await s.first.generator.drain(0.1) == 0
        with pytest.raises(errors.EngineUnavailable, match="go on with the stream at another"):
            await read(events, seen, never)
        s.runner.may_step.set()
        await go_on(s.second, seen)
        assert seen.outcome == whole.outcome
        s.check_idle()


async def test_a_stream_without_a_token_is_counted_as_left() -> None:
    async with stand() as s:
        raw = request(sampling={"prompt_logprobs": 1})  # such a stream is not kept
        s.runner.may_step.clear()
        events = s.first.generator.generate(raw)
        asking = asyncio.ensure_future(anext(events))
        await eventually(lambda: s.engine.loop.num_requests)
        assert await s.first.generator.drain(0.1) == 1
        s.runner.may_step.set()
        await asking
        await events.aclose()


async def test_streams_that_wait_for_a_row_are_handed_over() -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request())
        await know_each_other(s)
        s.runner.may_step.clear()
        seen = Seen()
        events = await begin(s.first, seen, num_deltas=0, resumes=True)
        draining = asyncio.create_task(s.first.generator.drain(LONG_S))
        with pytest.raises(HandedOver):
            await read(events, seen, never)
        s.runner.may_step.set()
        assert await draining == 0
        await go_on(s.second, seen)
        assert seen.outcome == whole.outcome


async def test_nobody_comes_for_what_was_handed_over() -> None:
    async with stand(keep_s=0.2) as s:
        await know_each_other(s)
        seen = Seen()
        events = await begin(s.first, seen, sampling={"max_tokens": 400}, resumes=True)
        s.runner.may_step.clear()
        draining = asyncio.create_task(s.first.generator.drain(LONG_S))
        with pytest.raises(HandedOver):
            await read(events, seen, never)
        assert await draining == 0
        s.runner.may_step.set()
        await eventually(lambda: s.engine.loop.num_requests == 0)


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("num_events", [1, 4])
async def test_a_stream_with_event_ids_breaks_off_and_goes_on_elsewhere(
    num_choices: int, num_events: int
) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "seed": 5, "ignore_eos": True}
    body |= {"n": num_choices, "stream": True, "stream_options": {"include_event_ids": True}}
    path = "/v1/completions"
    async with stand() as s, open_api(s.first.generator) as one, open_api(s.second.generator) as two:
        whole = Chunks()
        await stream(one, "POST", path, whole, json=body)
        await know_each_other(s)
        chunks = Chunks()
        if num_events == 1:
            s.runner.may_step.clear()
        async with one.http.stream("POST", path, json=body) as response:
            lines = response.aiter_lines()
            await read_lines(lines, chunks, num_events)
            s.runner.may_step.clear()
            draining = asyncio.create_task(s.first.generator.drain(LONG_S))
            with pytest.raises(httpx.RemoteProtocolError):
                await read_lines(lines, chunks)
        assert await draining == 0
        assert not chunks.is_done
        assert all("error" not in chunk for chunk in chunks.objects)
        s.runner.may_step.set()
        await stream(two, "POST", path, chunks, json=body, headers={"Last-Event-ID": chunks.last_id})
        assert chunks.is_done
        for index in range(num_choices):
            assert chunks.text(index) == whole.text(index)
        assert chunks.reasons == whole.reasons


async def test_a_stream_without_event_ids_is_served_until_the_drain_is_over() -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    async with stand() as s, open_api(s.first.generator) as api:
        await know_each_other(s)
        s.runner.may_step.clear()
        async with api.http.stream("POST", "/v1/completions", json=body) as response:
            assert await s.first.generator.drain(0.1) == 1
            ending = asyncio.create_task(api.server.stop(0.05))
            text = (await response.aread()).decode()
            s.runner.may_step.set()
            await ending
    assert '"error"' in text
    assert "[DONE]" not in text
