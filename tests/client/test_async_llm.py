"""AsyncLLM: deltas, totals in the last one, and what leaving does."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from tests.helpers.fake_frontend import FakeFrontend
from triptych import AsyncLLM, SamplingParams
from triptych.client import connection
from triptych.errors import EngineUnavailable, InvalidRequest, QueueFull
from triptych.types.sampling import OutputKind


@pytest.fixture
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
async def llm(frontend):
    async with AsyncLLM(address=frontend.address) as made:
        yield made


async def wait_until(condition, timeout_s=30.0):
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


async def test_final_only_gives_all_choices_together(llm):
    params = SamplingParams(n=3, output_kind=OutputKind.FINAL_ONLY)
    [output] = [output async for output in llm.generate("a b", params)]
    assert [choice.text for choice in output.outputs] == [" a b"] * 3
    assert output.metrics.first_token_latency == pytest.approx(3e-9)


@pytest.mark.parametrize(
    "prompt", [np.array([4, 5]), (4, 5), {"prompt_token_ids": [4, 5], "prompt": "four five"}]
)
async def test_prompts_come_in_any_form(llm, prompt):
    outputs = [output async for output in llm.generate(prompt)]
    assert outputs[-1].outputs[0].text == " 4 5"
    assert outputs[-1].prompt == ("four five" if isinstance(prompt, dict) else None)


async def test_options_and_conversations_are_sent(llm, frontend):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    prompt = {"prompt": "a", "cache_salt": "own"}
    async for output in llm.generate(prompt, None, "r1", priority=2, tenant="me", cache_salt="common"):
        assert output.request_id == "r1"
    hello = [{"role": "user", "content": "a b"}]
    chat = llm.chat(hello, tools=[tool], chat_template_kwargs={"enable_thinking": False}, tool_choice="none")
    outputs = [output async for output in chat]
    assert [output.outputs[0].text for output in outputs] == [" a", " a b"]
    plain, spoken = (request.generation for request in frontend.requests)
    assert (plain.priority, plain.tenant, plain.cache.salt) == (2, "me", "own")
    assert (spoken.chat.tools[0].name, spoken.chat.template_kwargs_json) == (
        "add",
        '{"enable_thinking": false}',
    )
    with pytest.raises(InvalidRequest, match="messages: expected one conversation, not 2"):
        await anext(llm.chat([hello, hello]))


async def test_aborting_health_and_the_tokenizer(llm, frontend):
    assert await llm.abort("one") == ["one"]
    assert await llm.abort(["one", "two"]) == ["one"]
    tokenizer = await llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert await llm.get_tokenizer() is tokenizer
    await llm.check_health()
    frontend.is_ready = False
    with pytest.raises(EngineUnavailable, match="it rests"):
        await llm.check_health()


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
