"""A request that has ended is freed at once, by reference counts: the collector finds nothing of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.frontend import FrontendCore, answer, collect, frontend_core, raw_request
from tests.helpers.stack import EngineStack, NaiveRunner, WorkerStack, make_config
from triptych import errors
from triptych.rpc.collector import freeze
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.submit import RequestHead
from triptych_services.frontend.access.caller import ANYONE
from triptych_services.frontend.engines.session import ChoiceOutput
from triptych_services.frontend.streams.accounting import RequestRecord
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.migrator import MigrationTerms
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.placement import AttachedStream
from triptych_services.frontend.streams.resume import ResumeToken
from triptych_services.frontend.streams.route import ChoiceRoute, RouteChange, Submission

DEADLINE_S = 60.0
OF_A_REQUEST = (RequestOutputs, Choice, ChoiceRoute, Submission, RequestRecord, AttachedStream)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Take all that was there before out of what is looked at: other tests of this process may hold requests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def alive() -> list[str]:
    return [type(each).__name__ for each in gc.get_objects() if type(each) in OF_A_REQUEST]


async def check_freed() -> None:
    """Wait until nothing of a request is left: timers that refer to it have been due, and tasks have ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            while alive():
                await asyncio.sleep(0.05)
    left = alive()
    assert not left, f"only the collector frees {len(left)} objects: {sorted(set(left))}"


@asynccontextmanager
async def one_engine() -> AsyncIterator[tuple[FakeEngine, FrontendCore]]:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        yield engine, core


async def finished(engine: FakeEngine, core: FrontendCore) -> None:
    task = asyncio.create_task(answer(core.generator, raw_request(sampling={"n": 3, "max_tokens": 4})))
    for number in range(3):
        engine.emit(await engine.next_submit(number), [65, 66], finish=FinishReason.LENGTH)
    await task


async def stopped_by_a_string(engine: FakeEngine, core: FrontendCore) -> None:
    ids = byte_tokenizer().encode("abc")
    raw = raw_request(sampling={"stop": ["bc"], "max_tokens": 9})
    task = asyncio.create_task(answer(core.generator, raw))
    engine.emit(await engine.next_submit(), ids)
    await task


async def left_by_its_client(engine: FakeEngine, core: FrontendCore) -> None:
    async with aclosing(core.generator.generate(raw_request(sampling={"max_tokens": 9}))) as events:
        await anext(events)
        engine.emit(await engine.next_submit(), [65])
        await anext(events)


async def aborted_by_name(engine: FakeEngine, core: FrontendCore) -> None:
    raw = raw_request(request_id="mine", sampling={"max_tokens": 9})
    task = asyncio.create_task(answer(core.generator, raw))
    engine.emit(await engine.next_submit(), [65])
    await eventually(lambda: core.generator.alive.abort_of(ANYONE, ["mine"], True))
    await task


async def cancelled_before_admission(engine: FakeEngine, core: FrontendCore) -> None:
    engine.is_mute = True
    task = asyncio.create_task(collect(core.generator, raw_request()))
    await engine.next_submit()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def refused(engine: FakeEngine, core: FrontendCore) -> None:
    engine.is_mute = True
    task = asyncio.create_task(collect(core.generator, raw_request(sampling={"n": 2})))
    engine.fail(await engine.next_submit(), "INVALID_REQUEST", "too long")
    with suppress(errors.TriptychError):
        await task
    del task


async def past_its_deadline(engine: FakeEngine, core: FrontendCore) -> None:
    with suppress(errors.DeadlineExceeded):
        await collect(core.generator, raw_request(deadline_s=0.3))


Scenario = Callable[[FakeEngine, FrontendCore], Awaitable[None]]


@pytest.mark.parametrize(
    "scenario",
    [
        finished,
        stopped_by_a_string,
        left_by_its_client,
        aborted_by_name,
        cancelled_before_admission,
        refused,
        past_its_deadline,
    ],
)
async def test_an_ended_request_is_freed(scenario: Scenario) -> None:
    async with one_engine() as (engine, core):
        await scenario(engine, core)
        await check_freed()


async def test_a_request_that_has_moved_is_freed() -> None:
    async with (
        FakeEngine(resume_ttl_s=10) as first,
        FakeEngine(engine_id="engine-1", resume_ttl_s=10) as second,
        frontend_core(first, second, moves=MigrationTerms()) as core,
    ):
        task = asyncio.create_task(answer(core.generator, raw_request(sampling={"max_tokens": 9})))
        await eventually(lambda: first.submitted or second.submitted)
        here, there = (first, second) if first.submitted else (second, first)
        here.emit(here.submitted[0], [65])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await here.die()
        there.emit(await there.next_submit(), [66], finish=FinishReason.LENGTH)
        assert (await task).finished.num_moves == 1
        del task
        await check_freed()


async def test_a_stream_that_goes_on_elsewhere_is_freed_at_both_frontends() -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config, 600))
    await worker.start()
    engine = EngineStack(make_config(worker.port))
    await engine.start()
    try:
        async with frontend_core(engine, keep_s=10.0) as first, frontend_core(engine, keep_s=10.0) as second:
            await attach(first, second)
            await check_freed()
    finally:
        await engine.stop()
        await worker.stop()


async def attach(first: FrontendCore, second: FrontendCore) -> None:
    raw = replace(
        raw_request([5, 6, 7], sampling={"max_tokens": 300, "ignore_eos": True}), api="grpc", answer={}
    )
    async with aclosing(first.generator.generate(raw)) as events:
        token = (await anext(events)).resume_token  # type: ignore[union-attr]
        await anext(events)
        rest = second.generator.attach(ResumeToken.parse(token), {}, "grpc")
        assert [event async for event in rest]
        with suppress(errors.AttachedElsewhere):
            await drop(events)


async def drop(events: Any) -> None:
    async for _ in events:
        pass


def test_nothing_is_collected_in_full_with_10_000_requests_alive() -> None:
    tokenizer, sampling = byte_tokenizer(), SamplingParams(max_tokens=64)
    prompt = np.arange(32, dtype=np.uint32)

    def ignore(route: ChoiceRoute, change: RouteChange) -> None:
        pass

    def create_request() -> RequestOutputs:
        outputs = RequestOutputs("r")
        choice = outputs.add_choice(sampling, tokenizer, prompt, "")
        route = ChoiceRoute(Submission(RequestHead("r"), None, prompt, sampling), choice, ignore, seed=1)  # type: ignore[arg-type]
        outputs.send_by([route])
        route.on_output(ChoiceOutput([65, 66]))
        return outputs

    thresholds = gc.get_threshold()
    try:
        freeze()
        gc.enable()
        before = gc.get_stats()[2]["collections"]
        requests = [create_request() for _ in range(10_000)]
        for _ in range(3):  # all of them end, and others come
            for place, request in enumerate(requests):
                request.close()
                requests[place] = create_request()
        assert gc.get_stats()[2]["collections"] == before
        for request in requests:
            request.close()
        del requests, request
        assert alive() == []
    finally:
        gc.set_threshold(*thresholds)
