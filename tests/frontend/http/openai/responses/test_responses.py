"""OpenAI's Responses API through the official client, down to a fake engine that says what a model would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent

from tests.frontend.requests.test_tools import TALKATIVE, TOKENIZER, http_api, prompt_of
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import HttpApi, open_api, schema_of_answer
from triptych.errors import GenerationLost, QueueFull
from triptych_services.frontend.requests.raw import RawChat

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": None,
}
NOW: Any = {
    "type": "function",
    "name": "now",
    "description": "The time of day.",
    "parameters": None,
    "strict": None,
}
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)


async def create(api: HttpApi, **fields: Any) -> Any:
    return await api.client.responses.create(**{"model": "tiny", "input": "Hi"} | fields)


async def events_of(api: HttpApi, **fields: Any) -> list[Any]:
    """Return the events of a stream, each checked against the official types and against our document."""
    body = {"model": "tiny", "input": "Hi", "stream": True} | fields
    response = await api.http.post("/v1/responses", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    document = (await api.http.get("/openapi.json")).json()
    schema = schema_of_answer(document, "/v1/responses", is_streamed=True)
    validator = jsonschema.Draft202012Validator(schema)
    events = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        validator.validate(event)
        EVENT.validate_python(event)
        events.append(event)
    return events


async def test_an_answer_is_split_into_items() -> None:
    async with http_api() as (api, engine):
        response = await create(api, tools=[ADD, NOW], instructions="Be brief.", metadata={"a": "b"})
        prompt = prompt_of(engine)
    assert isinstance(response, Response)
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    reasoning, message, add, now = response.output
    assert [part.text for part in reasoning.content] == ["Hm"]
    assert response.output_text == message.content[0].text == "One moment."
    assert [(call.name, json.loads(call.arguments)) for call in (add, now)] == [
        ("add", {"a": 1}),
        ("now", {}),
    ]
    assert len({item.id for item in response.output} | {add.call_id, now.call_id}) == 6
    assert response.metadata == {"a": "b"}
    assert response.instructions == "Be brief."
    assert [tool.name for tool in response.tools] == ["add", "now"]
    usage = response.usage
    assert usage.input_tokens == len(engine.submitted[-1].prompt_token_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 4
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert prompt.startswith('add({"type": "object", "properties": {"a": {"type": "integer"}}}) now(')
    assert prompt.endswith("system: Be brief.\nuser: Hi\nassistant:")


async def test_events_of_a_stream_follow_the_items() -> None:
    async with http_api() as (api, _):
        events = await events_of(api, tools=[ADD, NOW])
    kinds = [event["type"].removeprefix("response.") for event in events]
    order = [kind for number, kind in enumerate(kinds) if kind != kinds[number - 1]]
    text, call = (
        ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
         "output_item.done"],
        ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"],
    )  # fmt: skip
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    assert order == ["created", "in_progress", *reasoning, *text, *call, *call, "completed"]
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert final["output"] == done
    for index, item in enumerate(done):
        deltas = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == whole
    assert (events[0]["response"]["status"], final["status"]) == ("in_progress", "completed")


async def test_the_stream_helper_of_the_client_agrees_with_the_whole_answer() -> None:
    async with http_api() as (api, _):
        whole = await create(api, tools=[ADD, NOW])
        async with api.client.responses.stream(model="tiny", input="Hi", tools=[ADD, NOW]) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text = event.snapshot
            final = await stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert plain(final) == plain(whole)


def plain(response: Any) -> list[Any]:
    """Return the output without drawn ids."""
    items = response.model_dump()["output"]
    for item in items:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return [{name: value for name, value in item.items() if value is not None} for item in items]


async def test_text_between_calls_is_an_item_of_its_own() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    async with http_api(f"One.{call} Two. {call}{call}Three.") as (api, _):
        whole = await create(api, tools=[NOW])
        events = await events_of(api, tools=[NOW])
    shapes = [item.content[0].text if item.type == "message" else item.name for item in whole.output]
    assert shapes == ["One.", "now", "Two.", "now", "now", "Three."]
    assert [item["type"] for item in events[-1]["response"]["output"]] == [i.type for i in whole.output]


@pytest.mark.parametrize(
    "written",
    [lambda item: item, lambda item: item.model_dump(), lambda item: item.model_dump(by_alias=True)],
    ids=["as objects", "by attributes", "by names of the API"],
)
async def test_the_items_of_an_answer_can_be_sent_back(written: Callable[[Any], Any]) -> None:
    async with http_api() as (api, engine):
        response = await create(api, tools=[ADD, NOW])
        calls = [item for item in response.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "3"},
            {"type": "function_call_output", "call_id": calls[1].call_id,
             "output": [{"type": "input_text", "text": "12:00"}]},
        ]  # fmt: skip
        user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
        await create(api, input=[user, *map(written, response.output), *results], tools=[ADD])
        prompt = prompt_of(engine)
    assert prompt.endswith(
        "user: Hi\nassistant: One moment.<think>Hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "now", "arguments": {}}'
        f"</tool_call>\ntool: 3 answers {calls[0].call_id}\ntool: 12:00 answers {calls[1].call_id}\nassistant:"
    )


async def test_system_messages_at_the_beginning_are_one() -> None:
    items: Any = [
        {"role": "developer", "content": "Two."},
        {"type": "message", "role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "short"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "system", "content": "Late."},
    ]
    async with http_api() as (api, engine):
        await create(api, input=items, instructions="One.")
        prompt = prompt_of(engine)
    assert prompt == (
        "system: One.\n\nTwo.\nuser: Hi\nassistant: Yes\nNo<think>short</think>\nsystem: Late.\nassistant:"
    )


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with http_api("zqx") as (api, _):
        response = await create(api, max_output_tokens=2)
        events = await events_of(api, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("zq", "incomplete")
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "zq"
    assert response.max_output_tokens == 2


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_an_answer_is_parsed_into_a_model() -> None:
    said = '{"name": "Ada", "age": 36}'
    async with http_api(said) as (api, engine):
        parsed = await api.client.responses.parse(model="tiny", input="Hi", text_format=Person)
        async with api.client.responses.stream(model="tiny", input="Hi", text_format=Person) as stream:
            final = await stream.get_final_response()
        submitted = engine.submitted[-1].sampling.structured_outputs
        await create(api, text={"format": {"type": "json_object"}})
        anything = engine.submitted[-1].sampling.structured_outputs
    assert parsed.output_parsed == final.output_parsed == Person(name="Ada", age=36)
    assert submitted is not None
    assert "age" in str(submitted.grammar)
    assert anything is not None


async def test_demanded_calls_and_one_call_at_a_time() -> None:
    said = '[{"name": "add", "parameters": {"a": 3}}]'
    async with http_api(said) as (api, engine):
        for choice in ("required", {"type": "function", "name": "add"}):
            response = await create(api, tools=[ADD, NOW], tool_choice=choice)
            assert [(item.name, item.arguments) for item in response.output] == [("add", '{"a": 3}')]
            assert engine.submitted[-1].sampling.structured_outputs is not None
        assert response.tool_choice.name == "add"
    async with http_api() as (api, engine):
        response = await create(api, tools=[ADD, NOW], parallel_tool_calls=False)
        assert [item.name for item in response.output if item.type == "function_call"] == ["add"]
        await create(api, tools=[ADD], tool_choice="none")
        assert "add" not in prompt_of(engine)


async def test_a_call_of_a_function_in_a_namespace_names_it() -> None:
    clocks = {"type": "namespace", "name": "clocks", "description": "Clocks.", "tools": [NOW]}
    async with http_api() as (api, engine):
        response = await create(api, tools=[ADD, clocks])
        events = await events_of(api, tools=[ADD, clocks])
        assert prompt_of(engine).count("now(") == 1
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.tools\[0\]\.custom: this version"):
            await create(api, tools=[{**clocks, "tools": [{"type": "custom", "name": "x"}]}])
    add, now = response.output[2:]
    assert (add.namespace, now.namespace) == (None, "clocks")
    assert events[-1]["response"]["output"][3]["namespace"] == "clocks"
    assert response.tools[1].tools[0].name == "now"


async def test_effort_goes_to_the_template_and_reasoning_can_be_left_out() -> None:
    async with http_api("so\n</think>\n\nYes") as (api, engine):
        fields: Any = {"chat_template_kwargs": {"opens": True}, "include_reasoning": False}
        response = await create(api, reasoning={"effort": "xhigh", "summary": "auto"}, extra_body=fields)
        assert prompt_of(engine).endswith("assistant:high<think>")
        assert [item.type for item in response.output] == ["message"]
        await create(api, reasoning={"effort": "none"})
        assert prompt_of(engine).endswith("assistant:none-")


async def test_logprobs_stand_beside_the_text() -> None:
    async with open_api() as api:
        fields: Any = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"]}
        whole = await api.client.responses.create(**fields, top_logprobs=2)
        events = await events_of(api, **fields, top_logprobs=2)
        plain = await api.client.responses.create(**fields | {"include": ["reasoning.encrypted_content"]})
        alone = await api.client.responses.create(**fields)
    (message,) = whole.output
    tokens = message.content[0].logprobs
    assert [token.token for token in tokens] == ["0", *WORDS]
    assert tokens[5].bytes == [32, 195, 188]
    assert [(top.token, top.logprob) for top in tokens[5].top_logprobs] == [
        ("t1", -0.25),
        ("\ufffd", -9999.0),
    ]
    deltas = [entry for event in events if event["type"].endswith("delta") for entry in event["logprobs"]]
    done = [event for event in events if event["type"] == "response.output_text.done"]
    assert deltas == done[0]["logprobs"] == [token.model_dump() for token in tokens]
    assert plain.output[0].content[0].logprobs == []
    assert [entry.top_logprobs for entry in alone.output[0].content[0].logprobs] == [[]] * 7


async def test_a_failure_after_the_first_event_is_the_last_event() -> None:
    async with open_api() as api:
        api.generator.error_after_words = (2, GenerationLost("the engine is gone"))
        events = await events_of(api, model=MODEL)
        api.generator.admission_errors = [QueueFull("the queue is full", 3.0)]
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            await api.client.responses.create(model=MODEL, input="Hi", stream=True)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": "server_error", "message": "the engine is gone"},
    )
    assert response["output"][0]["content"][0]["text"] == "0" + "".join(WORDS[:2])


async def test_an_aborted_answer_is_incomplete_for_no_reason_of_its_own() -> None:
    async with FakeEngine(model=TALKATIVE) as engine, frontend_core(engine, tokenizer=TOKENIZER) as core:
        async with open_api(core.generator) as api:
            task = asyncio.create_task(create(api, extra_headers={"X-Request-Id": "mine"}))
            await engine.next_submit()
            aborted = await api.http.post("/abort_requests", json={"request_ids": ["resp_mine"]})
            response = await task
    assert aborted.json() == {"aborted_request_ids": ["resp_mine"]}
    assert (response.status, response.incomplete_details, response.output) == ("incomplete", None, [])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[HttpApi]:
    """One server for all bodies that are refused."""
    async with http_api() as (api, _):
        yield api


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"input": None}, "input", "no prompt is given"),
        ({"input": []}, "input", "the conversation is empty"),
        ({"input": 3}, "input", "must be text, or a list of items"),
        ({"input": [3]}, "input[0]", "must be an item with a type"),
        ({"input": [{"content": "x"}]}, "input[0].role", "is missing"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "input[0].foo", "no such field"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool' is refused"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "is missing"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments", "is missing"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "input[0].call_id", "is missing"),
        ({"input": "\ud800"}, "input", "half of a surrogate pair"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "\ud800"}]},
         "input[1].content", "half of a surrogate pair"),
        ({"instructions": "\ud800"}, "instructions", "half of a surrogate pair"),
        ({"instructions": 3}, "instructions", "3 is refused"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "'a b' is not 1 to 64 letters"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters", "a list is refused"),
        ({"tools": [ADD, ADD]}, "tools[1].name", "is there twice"),
        ({"tools": [{"name": "a"}]}, "tools[0]", "must be a tool with a type"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice", "'sometimes' is refused"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice", "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0 is below the limit 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "5000"),
        ({"top_logprobs": 21}, "top_logprobs", "21 is above the limit 20"),
        ({"top_logprobs": 1, "tools": [ADD]}, "top_logprobs", "may call tools"),
        ({"include": ["message.output_text.logprobs"], "tools": [ADD]}, "include", "may call tools"),
        ({"temperature": 3}, "temperature", "3 is above the limit 2"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "'enormous' is refused"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format.schema", "nothing"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format",
         "structured_outputs for another form"),
        ({"metadata": {"a": 1}}, "metadata.a", "1 is refused"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "17 entries are above the limit 16"),
        ({"stream_options": {}}, "stream_options", "set stream to true"),
        ({"truncation": "some"}, "truncation", "'some' is refused"),
        ({"inputs": "x"}, "inputs", "did you mean input?"),
    ],
)  # fmt: skip
async def test_each_bad_field_is_named(
    refusing: HttpApi, fields: dict[str, Any], param: str, why: str
) -> None:
    # not by the client, which cannot send half of a surrogate pair
    response = await refusing.post("/v1/responses", json.dumps({"model": "tiny", "input": "Hi"} | fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert why in error["message"]
    assert error["message"].count(f"{param}: ") <= 1


async def test_all_that_is_wrong_is_named_at_once() -> None:
    body = {
        "input": [{"type": "reasoning", "content": [{}]}, {"role": "user"}],
        "top_p": 2,
        "text": {"x": 1},
        "n": 3,
    }
    async with http_api() as (api, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.client.post("/responses", body=body, cast_to=object)
    message = str(caught.value.body["message"])  # type: ignore[index]
    for path in (
        "input[0].content[0].type",
        "input[0].content[0].text",
        "top_p",
        "text.x",
    ):
        assert f"{path}: " in message
    assert "input[1]" not in message, "a list stops at its first wrong entry"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].web_search"),
        ({"tools": [ADD, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].file_search"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice.allowed_tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].input_image"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": [{"type": "input_file"}]}]},
         "input[0].output[0].input_file"),
        ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_unbuilt_features_are_refused_by_name(
    refusing: HttpApi, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "input": "Hi"} | fields
    with pytest.raises(openai.BadRequestError, match="does not serve it yet") as caught:
        await refusing.client.post("/responses", body=body, cast_to=object)
    assert (caught.value.param, caught.value.code) == (param, "feature_disabled")


async def test_what_clients_send_and_nothing_depends_on_is_accepted() -> None:
    neutral = {
        "store": True, "background": False, "previous_response_id": None, "tools": [], "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": None, "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x", "safety_identifier": "y",
        "service_tier": "auto", "truncation": "disabled", "max_tool_calls": 3, "user": "ann",
        "client_metadata": {"x": "y"},
    }  # fmt: skip
    async with http_api("Hello") as (api, engine):
        response = await create(api, extra_body=neutral)
        assert (response.output_text, response.user, response.truncation) == ("Hello", "ann", "disabled")
        assert engine.submitted[-1].head.tenant == "ann"
        sampling = {
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 7,
            "priority": 2,
            "cache_salt": "s",
            "stop": "l",
        }
        response = await create(api, extra_body=sampling)
        assert response.output_text == "He"
        submitted = engine.submitted[-1]
        assert (submitted.seed, submitted.head.priority, submitted.head.cache_salt) == (7, 2, "s")
        assert submitted.sampling.min_p == pytest.approx(0.1)


async def test_a_conversation_that_is_too_long_may_lose_its_beginning() -> None:
    long = "word " * 3000
    async with http_api("Hello") as (api, engine):
        with pytest.raises(openai.BadRequestError, match="4096"):
            await create(api, input=long)
        response = await create(api, input=long, truncation="auto", max_output_tokens=9)
        assert response.usage.input_tokens == len(engine.submitted[-1].prompt_token_ids) == 4096 - 9


async def test_unknown_fields_of_items_may_be_left_out() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "odd": 1}], "extra": 2}
    async with open_api(refuses_unknown=False) as api:
        response = await api.http.post(
            "/v1/responses", json={"input": [item], "stream_options": None, "typo": 1}
        )
        assert response.status_code == 200
        prompt = api.generator.requests[-1].prompt
    assert isinstance(prompt, RawChat)
    assert prompt.messages == [{"role": "user", "content": "a"}]
