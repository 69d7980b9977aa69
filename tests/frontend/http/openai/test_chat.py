"""Chat completions through the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.http_api import HttpApi, open_api
from triptych_services.frontend.requests.raw import RawChat

ALL = "0" + "".join(WORDS)
USER: Any = [{"role": "user", "content": "hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    shared_api.generator.reset()
    return shared_api


async def test_an_answer_is_a_message(api: HttpApi) -> None:
    answer = await api.client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ALL, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user:hi"), 7)


async def test_a_stream_opens_each_choice_with_its_role_and_ends_it_once(api: HttpApi) -> None:
    stream = await api.client.chat.completions.create(
        model=MODEL, messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 14
    for index in range(2):
        parts = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == str(index) + ALL[1:]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]


async def test_the_stream_helper_of_the_client_accumulates_the_same(api: HttpApi) -> None:
    async with api.client.chat.completions.stream(model=MODEL, messages=USER, logprobs=True) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ALL
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert [token.token for token in logprobs.content or ()] == ["0", *WORDS]


async def test_logprobs_carry_bytes_and_rivals(api: HttpApi) -> None:
    answer = await api.client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2, max_completion_tokens=6
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    token = logprobs.content[5]
    assert (token.token, token.bytes, token.logprob) == (" ü", [32, 195, 188], -0.5)
    assert [(t.token, t.bytes, t.logprob) for t in token.top_logprobs] == [
        ("t1", [116, 49], -0.25),
        ("\ufffd", [0xE2, 0x80], -9999.0),
    ]


async def test_content_may_come_in_parts_of_text(api: HttpApi) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "Ann"}]
    await api.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        extra_body={"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}},
    )
    (raw,) = api.generator.requests
    assert raw.prompt == RawChat(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb", "name": "Ann"}],
        add_generation_prompt=False,
        template_kwargs={"enable_thinking": False},
    )


async def test_an_answer_can_be_sent_back_as_it_came(api: HttpApi) -> None:
    answer = await api.client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)
    again: Any = [*USER, answer.choices[0].message.model_dump(), *USER]
    await api.client.chat.completions.create(model=MODEL, messages=again, max_tokens=1)
    prompt = api.generator.requests[-1].prompt
    assert isinstance(prompt, RawChat)
    assert prompt.messages[1] == {"role": "assistant", "content": "0"}


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({}, 7),
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 3),
    ],
)
async def test_the_limit_has_two_names(api: HttpApi, limits: dict[str, int], num_tokens: int) -> None:
    answer = await api.client.chat.completions.create(model=MODEL, messages=USER, **limits)  # type: ignore[call-overload]
    assert answer.usage.completion_tokens == num_tokens


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "3 contradicts max_completion_tokens 4",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0 is below the limit 1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21 is above the limit 20"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "no prompt is given"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is not text"),
        ({"messages": [*USER, {"content": "x"}]}, "messages[1].role", "is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content",
            "must be text",
        ),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo", "no such field"),
        ({"messages": ["hi"]}, "messages[0]", "must be a JSON object"),
        ({"n": 2, "temperature": 0}, "n", "greedy"),
    ],
)
async def test_each_bad_field_is_named(api: HttpApi, fields: dict[str, Any], param: str, why: str) -> None:
    body = {"model": MODEL, "messages": USER} | fields
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        await api.client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    assert str(caught.value.body["message"]).count(f"{param}: ") == 1  # type: ignore[index]
    await api.client.chat.completions.create(model=MODEL, messages=USER)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
    ],
)
async def test_unbuilt_features_are_refused_by_name(api: HttpApi, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": USER} | fields
    with pytest.raises(openai.BadRequestError, match="does not serve it yet") as caught:
        await api.client.post("/chat/completions", body=body, cast_to=object)
    assert (caught.value.param, caught.value.code) == (param, "feature_disabled")


async def test_neutral_values_of_unsupported_fields_are_accepted(api: HttpApi) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "parallel_tool_calls": True, "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        # SGLang's fields, which its router and those that come of it add to each request
        "no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True,
    }  # fmt: skip
    answer = await api.client.chat.completions.create(model=MODEL, messages=USER, extra_body=neutral)
    assert answer.choices[0].message.content == ALL


async def test_unknown_fields_may_be_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    message = {"role": "user", "content": "a", "provider": {"x": 1}, "extra": 2}
    body = {
        "model": MODEL,
        "messages": [message],
        "max_tokenz": 3,
        "stream_options": {"odd": 1},
        "stream": False,
    }
    async with open_api(refuses_unknown=False) as api:
        for _ in range(2):
            answer = await api.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, "the rest is checked"
            assert answer.json()["error"]["param"] == "stream_options"
        del body["stream_options"]
        assert (await api.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompt = api.generator.requests[-1].prompt
    assert isinstance(prompt, RawChat)
    assert prompt.messages == [{"role": "user", "content": "a"}]
    warned = [record.args for record in caplog.records if "left out the field" in record.message]
    assert sorted(warned) == [
        ("max_tokenz",),
        ("messages[0].extra",),
        ("messages[0].provider",),
        ("stream_options.odd",),
    ]
    async with open_api() as api:
        assert (await api.http.post("/v1/chat/completions", json=body)).status_code == 400
