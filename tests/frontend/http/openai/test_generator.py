"""The HTTP API over the real generator, down to the wire of a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import open_api
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.submit import SubmitRequest

TOKENIZER = byte_tokenizer()
CHAT: Any = [{"role": "user", "content": "Hello"}]


def say(text: str) -> Any:
    def reply(request: SubmitRequest) -> Iterable[int]:
        return [*TOKENIZER.encode(text, add_special_tokens=False), 299]

    return reply


async def test_text_of_many_bytes_per_character_streams_whole() -> None:
    text = "naïve 世界 🙂!"
    async with (
        FakeEngine(say(text)) as engine,
        frontend_core(engine) as core,
        open_api(core.generator) as servicer,
    ):
        whole = await servicer.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=40)
        stream = await servicer.client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=40, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert whole.choices[0].message.content == "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert whole.choices[0].finish_reason == "stop"


async def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    async with (
        FakeEngine(say("one two three")) as engine,
        frontend_core(engine) as core,
        open_api(core.generator) as servicer,
    ):
        stream = await servicer.client.completions.create(model="tiny", prompt="a", stop="wo t", stream=True)
        parts = [chunk.choices[0] async for chunk in stream]
    assert "".join(part.text for part in parts) == "one t"
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]


async def test_each_choice_and_prompt_is_submitted_under_its_own_name() -> None:
    async with (
        FakeEngine(say("xyz")) as engine,
        frontend_core(engine) as core,
        open_api(core.generator) as servicer,
    ):
        answer = await servicer.client.completions.create(
            model="tiny", prompt=["a", "b"], n=2, seed=7, max_tokens=2, extra_headers={"X-Request-Id": "r"}
        )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "xy") for i in range(4)]
    names = sorted(submit.request_id for submit in engine.submitted)
    (common,) = {name[:-4] for name in names}
    assert common.startswith("r-")
    assert names == [common + end for end in ("-0#0", "-0#1", "-1#0", "-1#1")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_is_aborted_at_the_engine(is_stream: bool) -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as servicer:
        _, writer = await servicer.connect("/v1/completions", {"prompt": "a", "n": 2, "stream": is_stream})
        await engine.next_submit(1)
        engine.emit(engine.submitted[0], [65])
        writer.close()
        await eventually(lambda: engine.num_alive == 0)
        assert len(engine.aborted) == 2
        await eventually(lambda: core.generator.num_active == 0)


async def test_a_full_queue_at_the_engine_is_a_429_with_a_retry_time() -> None:
    async with (
        FakeEngine(is_mute=True) as engine,
        frontend_core(engine) as core,
        open_api(core.generator) as servicer,
    ):
        reader, writer = await servicer.connect("/v1/completions", {"prompt": "a"})
        refused = await engine.next_submit()
        engine.fail(
            refused, "QUEUE_FULL", "queue full: 64 requests wait, the limit is 64", retry_after_ms=1500
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        writer.close()
    assert head.startswith("http/1.1 429 ")
    assert "\r\nretry-after: 2\r\n" in head


async def test_a_template_that_refuses_names_the_messages() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    async with (
        FakeEngine() as engine,
        frontend_core(engine, tokenizer=tokenizer) as core,
        open_api(core.generator) as servicer,
    ):
        with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
            await servicer.client.chat.completions.create(model="tiny", messages=CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("field", "value"), [("role", "a\ud800"), ("name", "a\ud800"), ("tool_call_id", "\udfff")], ids=str
)
async def test_half_characters_are_refused_wherever_the_template_puts_them(field: str, value: str) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
    )
    async with (
        FakeEngine() as engine,
        frontend_core(engine, tokenizer=byte_tokenizer(chat_template=template)) as core,
        open_api(core.generator) as servicer,
    ):
        body = json.dumps({"messages": [{**CHAT[0], field: value}]})
        response = await servicer.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")
    assert "surrogate" in response.json()["error"]["message"]


async def test_health_follows_the_engine() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as servicer:
        assert (await servicer.http.get("/health")).status_code == 200
        engine.set_ready(False, "the worker is loading")
        await eventually(lambda: not core.generator.is_ready)
        response = await servicer.http.get("/health")
    assert response.status_code == 503
    assert "the worker is loading" in response.json()["error"]["message"]


async def test_what_tokenize_refuses_is_named_in_the_client_s_words() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as servicer:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}
        response = await servicer.http.post("/tokenize", json=body)
    assert response.json()["error"]["param"] == "chat_template_kwargs.messages"


async def test_bad_words_reach_the_engine_as_tokens() -> None:
    words = ["stop", "  stop", "é", " "]
    async with (
        FakeEngine(say("a")) as engine,
        frontend_core(engine) as core,
        open_api(core.generator) as servicer,
    ):
        for sent in (words, "stop"):
            body: Any = {"bad_words": sent}
            await servicer.client.completions.create(model="tiny", prompt="a", extra_body=body)
            await servicer.client.chat.completions.create(model="tiny", messages=CHAT, extra_body=body)
        with pytest.raises(openai.BadRequestError, match=r"bad_words\[1\]: the empty string") as caught:
            await servicer.client.completions.create(
                model="tiny", prompt="a", extra_body={"bad_words": ["a", ""]}
            )
    assert caught.value.param == "bad_words[1]"
    wanted = [
        tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("stop", " stop", "é", " é", " ")
    ]
    assert [list(choice.sampling.bad_words) for choice in engine.submitted] == [wanted] * 2 + [wanted[:2]] * 2


async def test_an_output_that_repeats_itself_is_cut_over_http() -> None:
    body: Any = {"repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as servicer:
        call = asyncio.create_task(
            servicer.client.completions.create(model="tiny", prompt="a", extra_body=body)
        )
        choice = await engine.next_submit()
        engine.emit(choice, TOKENIZER.encode("xx", add_special_tokens=False), finish=FinishReason.REPETITION)
        (answer,) = (await call).choices
        with pytest.raises(openai.BadRequestError, match=r"min_count: 1 is below the limit 2") as caught:
            await servicer.client.completions.create(
                model="tiny",
                prompt="a",
                extra_body={"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
            )
    assert choice.sampling.repetition_detection == RepetitionDetection(3, 4, min_pattern_size=1)
    assert (answer.text, answer.finish_reason) == ("xx", "length")
    assert answer.model_extra == {"stop_reason": "repetition_detected"}
    assert caught.value.param == "repetition_detection.min_count"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logprob_token_ids": [1], "logprobs": 2}, "has no place beside the 2 best"),
        ({"logprob_token_ids": [300]}, r"logprob_token_ids\[0\]: 300 is not in the vocabulary"),
        ({"logprob_token_ids": list(range(129))}, "129 is above the limit 128"),
    ],
)
async def test_named_tokens_that_cannot_be_are_refused(fields: Any, why: str) -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as servicer:
        with pytest.raises(openai.BadRequestError, match=why):
            await servicer.client.completions.create(model="tiny", prompt="a", extra_body=fields)
        with pytest.raises(openai.BadRequestError, match="logprob_token_ids: needs logprobs to be true"):
            await servicer.client.chat.completions.create(
                model="tiny", messages=CHAT, extra_body={"logprob_token_ids": [1]}
            )
