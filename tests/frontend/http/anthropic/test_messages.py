"""Anthropic's Messages API through the official client, down to a fake engine that says what a model would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pydantic
import pytest
import pytest_asyncio
from anthropic.types import Message, RawMessageStreamEvent

from tests.frontend.requests.test_tools import TOKENIZER, prompt_of
from tests.frontend.requests.test_tools import http_api as openai_api
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.http_api import DEADLINE_S, TRUSTS_NOBODY, HttpApi, open_api, schema_of_answer
from triptych.config.api_keys import entry_line
from triptych.errors import GenerationLost, QueueFull
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.requests.raw import RawChat

ADD: Any = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NOW: Any = {"name": "now", "description": "The time of day.", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "Hi"}
EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)


def client_of(api: HttpApi, key: str = "none", **options: Any) -> anthropic.AsyncAnthropic:
    address = f"http://127.0.0.1:{api.port}"
    options = {"api_key": key, "max_retries": 0, "timeout": DEADLINE_S} | options
    http_client = anthropic.DefaultAsyncHttpxClient(verify=TRUSTS_NOBODY)
    return anthropic.AsyncAnthropic(base_url=address, http_client=http_client, **options)


@asynccontextmanager
async def http_api(*said: str) -> AsyncIterator[tuple[HttpApi, anthropic.AsyncAnthropic, FakeEngine]]:
    async with openai_api(*said) as (api, engine), client_of(api) as client:
        yield api, client, engine


async def create(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    return await client.messages.create(**{"model": "tiny", "max_tokens": 900, "messages": [USER]} | fields)


async def events_of(api: HttpApi, **fields: Any) -> list[Any]:
    """Return the events of a stream, each checked against the official types and against our document."""
    body = {"model": "tiny", "max_tokens": 900, "messages": [USER], "stream": True} | fields
    response = await api.http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    document = (await api.http.get("/openapi.json")).json()
    schema = schema_of_answer(document, "/v1/messages", is_streamed=True)
    validator = jsonschema.Draft202012Validator(schema)
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        validator.validate(event)
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def plain(message: Any) -> list[Any]:
    """Return the content without drawn ids."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


async def test_an_answer_is_split_into_blocks() -> None:
    async with http_api() as (_, client, engine):
        message = await create(client, tools=[ADD, NOW], system="Be brief.")
        prompt = prompt_of(engine)
        num_prompt_tokens = len(engine.submitted[-1].prompt_token_ids)
    assert isinstance(message, Message)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "tool_use")
    assert plain(message) == [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert message.content[2].id != message.content[3].id
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt_tokens
    assert usage.cache_read_input_tokens == 4
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
    assert message._request_id is not None
    assert message.id == f"msg_{message._request_id}"
    assert prompt.startswith('add({"type": "object", "properties": {"a": {"type": "integer"}}}) now(')
    assert prompt.endswith("system: Be brief.\nuser: Hi\nassistant:")


async def test_events_of_a_stream_follow_the_blocks() -> None:
    async with http_api() as (api, _, engine):
        events = await events_of(api, tools=[ADD, NOW])
        num_prompt_tokens = len(engine.submitted[-1].prompt_token_ids)
    kinds = [event["type"] for event in events]
    order = [kind for number, kind in enumerate(kinds) if kind != kinds[number - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == num_prompt_tokens
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["input_tokens"] == num_prompt_tokens - 4


async def test_the_stream_helper_of_the_client_agrees_with_the_whole_answer() -> None:
    async with http_api() as (_, client, _):
        whole = await create(client, tools=[ADD, NOW])
        async with client.messages.stream(
            model="tiny", max_tokens=900, messages=[USER], tools=[ADD, NOW]
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert text == "One moment."
    assert plain(final) == plain(whole)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)


async def test_text_between_calls_is_a_block_of_its_own() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    async with http_api(f"One.{call} Two. {call}{call}Three.") as (_, client, _):
        message = await create(client, tools=[NOW])
    shapes = [block.text if block.type == "text" else block.name for block in message.content]
    assert shapes == ["One.", "now", "Two.", "now", "now", "Three."]


async def test_arguments_that_cannot_be_sent_as_json_are_not_lost() -> None:
    arguments = '{"a": 1e999}'
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    async with http_api(said) as (_, client, _):
        message = await create(client, tools=[ADD])
    assert [block.input for block in message.content] == [{"INVALID_JSON": arguments}]


async def test_results_of_calls_go_back_to_the_model() -> None:
    async with http_api() as (_, client, engine):
        message = await create(client, tools=[ADD, NOW])
        add, now = message.content[2:]
        results: Any = [
            {"type": "tool_result", "tool_use_id": add.id, "content": "3"},
            {"type": "tool_result", "tool_use_id": now.id, "is_error": True, "content": [
                {"type": "text", "text": "no"}, {"type": "text", "text": "clock"}]},
            {"type": "text", "text": "Go on,", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "please."},
        ]  # fmt: skip
        turns = [
            USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
        await create(client, messages=turns, tools=[ADD])
        prompt = prompt_of(engine)
    assert prompt.endswith(
        "user: Hi\nassistant: One moment.<think>Hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "now", "arguments": {}}'
        f"</tool_call>\ntool: 3 answers {add.id}\ntool: no\nclock answers {now.id}\nuser: Go on,\nplease.\nassistant:"
    )


async def test_the_last_turn_of_the_assistant_is_continued() -> None:
    async with http_api("wo") as (_, client, engine):
        await create(client, messages=[USER, {"role": "assistant", "content": "One, t"}])
        assert prompt_of(engine).endswith("assistant: One, t")
        call = {"type": "tool_use", "id": "x", "name": "now", "input": {}}
        for content in ([call], [{"type": "thinking", "thinking": "Hm", "signature": ""}]):
            with pytest.raises(anthropic.BadRequestError, match="without text to go on with"):
                await create(client, messages=[USER, {"role": "assistant", "content": content}])


async def test_thoughts_that_were_cut_are_a_turn() -> None:
    async with http_api("wo") as (_, client, engine):
        cut = {"type": "thinking", "thinking": "Hm", "signature": ""}
        await create(client, messages=[USER, {"role": "assistant", "content": [cut]}, USER])
        assert prompt_of(engine).endswith("user: Hi\nassistant: <think>Hm</think>\nuser: Hi\nassistant:")


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "zqx-zqx"),
        ({"max_tokens": 2}, "max_tokens", None, "zq"),
        ({"stop_sequences": ["x-", "-"]}, "stop_sequence", "x-", "zq"),
        ({"stop_token_ids": TOKENIZER.encode("x", add_special_tokens=False)}, "end_turn", None, "zq"),
    ],
)
async def test_stop_reasons(fields: Any, reason: str, sequence: str | None, text: str) -> None:
    async with http_api("zqx-zqx") as (api, client, _):
        message = await create(client, extra_body=fields)
        end = (await events_of(api, **fields))[-2]["delta"]
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert end == {"stop_reason": reason, "stop_sequence": sequence}
    assert message.content[0].text == text


async def test_demanded_calls_and_one_call_at_a_time() -> None:
    said = '[{"name": "add", "parameters": {"a": 3}}]'
    async with http_api(said) as (_, client, engine):
        for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
            message = await create(client, tools=[ADD, NOW], tool_choice=choice)
            assert [(block.name, block.input) for block in message.content] == [("add", {"a": 3})]
            assert message.stop_reason == "tool_use"
            assert engine.submitted[-1].sampling.structured_outputs is not None
    async with http_api() as (_, client, engine):
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await create(client, tools=[ADD, NOW], tool_choice=choice)
        assert [block.name for block in message.content if block.type == "tool_use"] == ["add"]
        await create(client, tools=[ADD], tool_choice={"type": "none"})
        assert "add" not in prompt_of(engine)


async def test_thinking_is_mapped_to_the_template() -> None:
    opens: Any = {"extra_body": {"chat_template_kwargs": {"opens": True}}}
    async with http_api("so\n</think>\n\nYes") as (_, client, engine):
        message = await create(
            client, **opens, thinking={"type": "adaptive"}, output_config={"effort": "max"}
        )
        assert plain(message)[0]["thinking"] == "so"
        assert prompt_of(engine).endswith("assistant:high<think>")
        message = await create(client, **opens, thinking={"type": "adaptive", "display": "omitted"})
        assert [block.type for block in message.content] == ["text"]
        await create(client, **opens, thinking={"type": "enabled", "budget_tokens": 1024})
        assert prompt_of(engine).endswith("assistant:<think>")
        await create(client, **opens, thinking={"type": "disabled"})
        assert prompt_of(engine).endswith("assistant:-")


class Person(pydantic.BaseModel):
    name: str


async def test_an_answer_is_parsed_into_a_model() -> None:
    async with http_api('{"name": "Ada"}') as (_, client, engine):
        parsed = await client.messages.parse(
            model="tiny", max_tokens=99, messages=[USER], output_format=Person
        )
        submitted = engine.submitted[-1].sampling.structured_outputs
    assert parsed.parsed_output == Person(name="Ada")
    assert submitted is not None


async def test_tokens_are_counted_as_they_are_computed() -> None:
    call: Any = {"messages": [USER], "system": "Be brief.", "tools": [ADD], "thinking": {"type": "disabled"}}
    async with http_api() as (_, client, engine):
        counted = await client.messages.count_tokens(model="tiny", **call)
        await create(client, **call)
        assert counted.input_tokens == len(engine.submitted[-1].prompt_token_ids)
        with pytest.raises(anthropic.BadRequestError, match="messages: none are given"):
            await client.messages.count_tokens(model="tiny", messages=[])
        tool: Any = {"type": "web_search_20250305", "name": "web_search"}
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.web_search_20250305: this version"):
            await client.messages.count_tokens(model="tiny", messages=[USER], tools=[tool])


async def test_samplings_fields_and_the_user_are_passed_on() -> None:
    async with http_api("zqx") as (_, client, engine):
        extra = {"min_p": 0.1, "seed": 7, "priority": 2, "cache_salt": "s", "temperature": 0.5, "top_k": 9}
        await create(client, metadata={"user_id": "ann"}, extra_body=extra)
        submitted = engine.submitted[-1]
    head = submitted.head
    assert (head.tenant, submitted.seed, head.priority, head.cache_salt) == ("ann", 7, 2, "s")
    assert (submitted.sampling.temperature, submitted.sampling.top_k) == (0.5, 9)


async def test_errors_have_anthropics_shape() -> None:
    async with open_api() as api, client_of(api) as client:
        cases: list[tuple[Exception, type[anthropic.APIStatusError], str]] = [
            (QueueFull("full", 3.0), anthropic.RateLimitError, "rate_limit_error"),
            (GenerationLost("lost"), anthropic.ServiceUnavailableError, "overloaded_error"),
            (ArithmeticError("a bug"), anthropic.InternalServerError, "api_error"),
        ]
        for error, kind, name in cases:
            for stream in (False, True):
                api.generator.admission_errors = [error]
                with pytest.raises(kind) as caught:
                    await create(client, model=MODEL, max_tokens=5, stream=stream)
                body: Any = caught.value.body
                assert (body["type"], body["error"]["type"]) == ("error", name)
                assert body["request_id"] == caught.value.request_id
        with pytest.raises(anthropic.NotFoundError, match="no engine serves 'other'") as missing:
            await create(client, model="other")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        for path, method in (("/v1/messages/nowhere", "POST"), ("/v1/messages", "GET")):
            body = (await api.http.request(method, path)).json()
            assert body["type"] == "error"
        large = await api.post("/v1/messages", b" " * (11 << 20))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert "request-id" not in (await api.http.get("/v1/models")).headers


async def test_a_failure_after_the_first_event_is_the_last_event() -> None:
    async with open_api() as api, client_of(api) as client:
        api.generator.error_after_words = (2, GenerationLost("the engine is gone"))
        events = await events_of(api, model=MODEL, max_tokens=20)
        stream = await create(client, model=MODEL, max_tokens=20, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
            [event async for event in stream]
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "the engine is gone"}


async def test_keys_are_sent_either_way(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("ann", "key-ann"))
    async with open_api(keys=ApiKeys(file)) as api:
        for options in ({"key": "key-ann"}, {"api_key": None, "auth_token": "key-ann"}):
            async with client_of(api, **options) as client:
                message = await create(client, model=MODEL, max_tokens=20)
                assert message.content[0].text == "0" + "".join(WORDS)
        async with client_of(api, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await create(client, model=MODEL)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[HttpApi]:
    """One server for all bodies that are refused."""
    async with openai_api() as (api, _):
        yield api


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "path", "why"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "0 is below the limit 1"),
        ({"max_tokens": "x"}, "max_tokens", "'x' is refused"),
        ({"messages": None}, "messages", "no prompt is given"),
        ({"messages": []}, "messages", "the conversation is empty"),
        ({"messages": ["x"]}, "messages[0]", "must be an object with a role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "must be an object with a role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be text, or a list"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1 item"),
        ({"messages": [USER | {"name": "x"}]}, "messages[0].name", "no such field"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id", "is missing"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": "z"}]}]},
         "messages[0].content[0].input", "'z' is refused"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "\ud800"}]}, USER]},
         "messages[1].content[0].thinking", "half of a surrogate pair"),
        ({"system": [{"type": "text", "text": "\ud800"}]}, "system", "half of a surrogate pair"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "the empty string"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences", "33"),
        ({"temperature": 3}, "temperature", "3 is above the limit 2"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "'a b' is not 1 to 64 letters"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "is missing"),
        ({"tools": [ADD, ADD]}, "tools[1].name", "is there twice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice", "none of the tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
        ({"tools": [ADD], "tool_choice": {"type": "some"}}, "tool_choice.type", "'some' is refused"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "must be an object"),
        ({"thinking": {"type": "some"}}, "thinking.type", "'some' is refused"),
        ({"output_config": {"effort": "enormous"}}, "output_config.effort", "'enormous' is refused"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
         "output_config.format.schema", "nothing"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "structured_outputs": {"regex": "a"}},
         "output_config.format", "structured_outputs for another form"),
        ({"metadata": {"user_id": "x" * 257}}, "metadata.user_id", "257 bytes are above the limit 256"),
        ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
    ],
)  # fmt: skip
async def test_each_bad_field_is_named(
    refusing: HttpApi, fields: dict[str, Any], path: str, why: str
) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER]} | fields
    response = await refusing.post("/v1/messages", json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].count(f"{path}: ") == 1
    assert why in error["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].image"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]},
         "messages[0].content[0].server_tool_use"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].image"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].bash_20250124"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_unbuilt_features_are_refused_by_name(fields: dict[str, Any], path: str) -> None:
    async with http_api() as (_, client, _):
        with pytest.raises(anthropic.BadRequestError, match="does not serve it yet") as caught:
            await create(client, extra_body=fields)
    assert caught.value.body["error"]["message"].startswith(f"{path}: ")  # type: ignore[index]


async def test_what_clients_send_and_nothing_depends_on_is_accepted() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body: Any = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "tools": [ADD | cached | {"type": "custom", "strict": True}],
        "service_tier": "auto",
        "metadata": {"user_id": None},
        "extra_body": {"context_management": {"edits": []}, "betas": ["x"]},
    }
    async with http_api() as (_, client, engine):
        await create(client, **body)
        assert "system: Be brief.\nuser: Hi" in prompt_of(engine)
        await client.beta.messages.create(
            model="tiny", max_tokens=9, messages=[USER], betas=["context-1m-2025-08-07"]
        )
        assert "Be brief." not in prompt_of(engine)


async def test_unknown_fields_may_be_left_out() -> None:
    block = {"type": "text", "text": "a", "odd": 1}
    turn = {"role": "user", "content": [block], "extra": 2}
    async with open_api(refuses_unknown=False) as api:
        body = {"messages": [turn], "max_tokens": 5, "typo": 1}
        assert (await api.http.post("/v1/messages", json=body)).status_code == 200
        prompt = api.generator.requests[-1].prompt
    assert isinstance(prompt, RawChat)
    assert prompt.messages == [{"role": "user", "content": "a"}]
