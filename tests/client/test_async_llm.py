"""AsyncLLM: deltas, totals in the last one, and what leaving does."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.helpers.fake_frontend import FakeFrontend
from triptych import AsyncLLM, SamplingParams
from triptych.client import connection
from triptych.errors import EngineUnavailable, QueueFull
from triptych.types.sampling import OutputKind


@pytest.fixture
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
async def llm(frontend):
    async with AsyncLLM(address=frontend.address) as made:
        yield made


async def wait_until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=8)])
async def test_outputs_are_cumulative_by_default(llm, params):
    outputs = [output async for output in llm.generate("a b c", params)]
    assert [output.outputs[0].text for output in outputs] == [" a", " a b", " a b c"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


async def test_deltas_concatenate_to_the_answer_and_the_last_one_has_the_totals(llm):
    params = SamplingParams(max_tokens=8, output_kind=OutputKind.DELTA)
    outputs = [output async for output in llm.generate("a b c", params)]
    assert [output.outputs[0].text for output in outputs] == [" a", " b", " c"]
    assert [output.finished for output in outputs] == [False, False, True]
    assert outputs[-1].usage.num_output_tokens == 3
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert all(output.prompt == "a b c" and output.prompt_token_ids == [0, 1, 2] for output in outputs)


async def test_every_choice_ends_once(llm):
    outputs = [output async for output in llm.generate("a b", SamplingParams(n=2))]
    ends = [(o.outputs[0].index, o.finished) for o in outputs if o.outputs[0].finish_reason]
    assert ends == [(0, False), (1, True)]


async def test_final_only_gives_each_choice_once(llm):
    params = SamplingParams(output_kind=OutputKind.FINAL_ONLY)
    outputs = [output async for output in llm.generate("a b", params)]
    assert [output.outputs[0].text for output in outputs] == [" a b"]
    assert outputs[0].finished


async def test_leaving_the_iterator_aborts_the_request(llm, frontend):
    frontend.token_delay_s = 0.01
    async for _ in llm.generate("word " * 500):
        break
    await wait_until(lambda: frontend.num_cancelled == 1 and frontend.num_running == 0)


async def test_a_full_server_is_the_callers_to_retry(llm, frontend):
    frontend.capacity = 0
    with pytest.raises(QueueFull):
        await anext(llm.generate("a"))


async def test_the_first_call_starts_it_and_close_ends_it(frontend):
    llm = AsyncLLM(address=frontend.address)
    outputs = [output async for output in llm.generate([7])]
    assert outputs[0].prompt is None
    await llm.close()
    await llm.close()


async def test_an_address_where_nobody_serves_is_told(frontend):
    await asyncio.to_thread(frontend.set_ready, False)
    with pytest.raises(EngineUnavailable, match=r"not ready after 0\.2 s"):
        await AsyncLLM(address=frontend.address, ready_timeout_s=0.2).start()


async def test_cancelling_the_start_waits_until_nothing_is_left(monkeypatch):
    started, undone = threading.Event(), threading.Event()

    def launch(config, *, ready_timeout_s, check):
        started.set()
        try:
            while True:
                check()
                time.sleep(0.005)
        finally:
            undone.set()

    monkeypatch.setattr(connection, "launch", launch)
    starting = asyncio.create_task(AsyncLLM().start())
    await wait_until(started.is_set)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert undone.is_set()
