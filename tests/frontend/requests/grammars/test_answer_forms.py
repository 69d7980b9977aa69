"""Demanded calls, forms beside calls and reasoning, and strict tools, through HTTP down to a fake engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.tool_answers import (
    ADD,
    BODY,
    EOS_ID,
    NOW,
    TALKATIVE,
    TOKENIZER,
    USER,
    chat,
    http_api,
    say,
)
from triptych.text.tokenizer import Tokenizer

REFERRING: Any = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/Place"}},
            "required": ["to"],
            "$defs": {
                "Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
            },
        },
    },
}


@pytest.mark.parametrize(
    ("choice", "parallel", "finish_reason"),
    [
        ("required", True, "tool_calls"),
        ("required", False, "tool_calls"),
        ({"type": "function", "function": {"name": "go"}}, True, "stop"),
    ],
)
@pytest.mark.parametrize("format", [None, {"type": "json_object"}])
async def test_demanded_calls_are_a_form_of_the_answer(
    choice: Any, parallel: bool, finish_reason: str, format: Any
) -> None:
    said = '[{"name": "go", "parameters": {"to": {"x": 3}}}]'
    fields = {"tools": [ADD, REFERRING], "tool_choice": choice, "parallel_tool_calls": parallel}
    async with http_api(said) as (api, engine):
        answer = (await chat(api, **fields, **({"response_format": format} if format else {}))).choices[0]
        matcher = matcher_of(engine)
    assert answer.finish_reason == finish_reason
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == [
        ("go", '{"to": {"x": 3}}')
    ]
    assert answer.message.content is None
    assert allows(matcher, said.replace(" ", ""))
    for wrong in (
        "",
        "[]",
        "{}",
        '[{"name": "go", "parameters": {"to": 3}}]',
        '[{"name": "sub", "parameters": {}}]',
    ):
        assert not allows(matcher, wrong.replace(" ", "")), wrong
    assert allows(matcher, '[{"name":"add","parameters":{"a":1}}]') is (choice == "required")
    assert allows(matcher, f"{said[:-1]},{said[1:]}".replace(" ", "")) is (parallel and choice == "required")


def matcher_of(engine: FakeEngine, tokenizer: Tokenizer = TOKENIZER) -> LLMatcher:
    """Return what holds the latest answer to its form."""
    form = engine.submitted[-1].sampling.structured_outputs
    assert form is not None, "the engine is told the form"
    assert form.grammar is not None
    backend = LLTokenizer(tokenizer.to_json(), n_vocab=TALKATIVE.vocab_size, eos_token=[EOS_ID])
    return LLMatcher(backend, form.grammar, log_level=0)


def allows(matcher: LLMatcher, text: str) -> bool:
    """Return whether a text is a whole answer."""
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


async def test_calls_that_are_demanded_and_cut_leave_no_content() -> None:
    said = '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "para'
    async with http_api() as (api, engine):
        for end in range(len(said) + 1):
            engine.reply = say(said[:end])
            whole = (await chat(api, tools=[ADD], tool_choice="required")).choices[0].message
            stream = await chat(api, tools=[ADD], tool_choice="required", stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert whole.content is None, said[:end]
            assert not any(delta.content for delta in deltas)
            assert deltas[0].content is None, "an empty text would begin a text"


async def test_a_stop_string_inside_of_a_call_is_the_reason() -> None:
    async with http_api('[{"name": "add", "parameters": {"a": 1}}]') as (api, _):
        for stop, reason in (('"a": 1', "stop"), ("}]", "tool_calls"), ("never", "tool_calls")):
            answer = await chat(api, tools=[ADD], tool_choice="required", stop=[stop])
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == reason, stop
            assert json.loads(call.function.arguments) in ({}, {"a": 1})


FORM: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


@pytest.mark.parametrize(
    "said", ['{"n": 3}', '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']
)
async def test_beside_a_form_the_model_may_think_and_call(said: str) -> None:
    async with http_api(f"<think>Hm</think>{said}") as (api, engine):
        whole = (await chat(api, tools=[ADD], response_format=FORM)).choices[0]
        stream = await chat(api, tools=[ADD], response_format=FORM, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        matcher = matcher_of(engine)
    assert whole.message.reasoning_content == "Hm"
    if said.startswith("{"):
        assert (whole.message.content, whole.finish_reason, text) == (said, "stop", said)
    else:
        (call,) = whole.message.tool_calls
        assert (call.function.arguments, whole.finish_reason, text) == ('{"a": 1}', "tool_calls", "")
    for good in (
        '{"n":3}',
        '<think>x</think>{"n":3}',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    ):
        assert allows(matcher, good), good
    for wrong in ("Hello", '{"n":"3"}', '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'):
        assert not allows(matcher, wrong), wrong


async def test_strict_tools_hold_calls_to_their_schemas() -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    async with http_api("Hello") as (api, engine):
        answer = await chat(api, tools=[strict, NOW])
        matcher = matcher_of(engine)
        await chat(api, tools=[ADD, NOW])
        assert engine.submitted[-1].sampling.structured_outputs is None
    assert answer.choices[0].message.content == "Hello"
    call = '<tool_call>{{"name": "add", "arguments": {{"a": {}}}}}</tool_call>'
    assert allows(matcher, f"One moment. {call.format(1)} Done.")
    assert not allows(matcher, f"One moment. {call.format('true')} Done.")


@pytest.mark.parametrize(
    ("kwargs", "may_think"), [({}, True), ({"opens": True}, True), ({"enable_thinking": False}, False)]
)
async def test_a_form_comes_behind_reasoning_unless_it_is_off(
    kwargs: dict[str, Any], may_think: bool
) -> None:
    async with http_api('{"n": 3}') as (api, engine):
        await chat(api, response_format=FORM, extra_body={"chat_template_kwargs": kwargs})
        matcher = matcher_of(engine)
    opening = "" if kwargs.get("opens") else "<think>"
    assert allows(matcher, f'{opening}x</think>{{"n":3}}') is may_think
    assert allows(matcher, '{"n":3}') is not kwargs.get("opens", False)


async def test_marks_inside_of_a_form_are_content() -> None:
    said = '{"a": "<think><tool_call>{}"}'
    async with http_api(said) as (api, _):
        answer = await chat(api, tools=[ADD], response_format={"type": "json_object"})
    assert answer.choices[0].message.content == said
    assert answer.choices[0].finish_reason == "stop"


async def test_what_a_schema_loses_is_said_in_a_header() -> None:
    tags = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": tags, "strict": False}}
    tool = {"type": "function", "function": {"name": "f", "parameters": tags}}
    form, calls = {"response_format": format}, {"tools": [tool], "tool_choice": "required"}
    places = {
        "response_format.json_schema.schema": form,
        "tools[0].function.parameters": calls,
    }
    async with http_api("{}") as (api, _):
        for path, fields in places.items():
            for stream in (False, True):
                body = {"model": "tiny", "messages": USER, "stream": stream, **fields}
                answer = await api.http.post("/v1/chat/completions", json=body)
                assert json.loads(answer.headers["X-Not-Enforced"]) == [f"{path}.properties.a.uniqueItems"]
        assert "X-Not-Enforced" not in (await api.http.post("/v1/chat/completions", json=BODY)).headers
        for body, path in (
            ({"input": "Hi", "text": {"format": {"type": "json_schema", "schema": tags, "strict": False}}},
             "responses"),
            ({"messages": USER, "max_tokens": 9, "tools": [{"name": "f", "input_schema": tags}],
              "tool_choice": {"type": "any"}}, "messages"),
            ({"prompt": "Hi", "response_format": format}, "completions"),
        ):  # fmt: skip
            for stream in (False, True):
                answer = await api.http.post(f"/v1/{path}", json={"model": "tiny", "stream": stream, **body})
                assert len(json.loads(answer.headers["X-Not-Enforced"])) == 1, answer.text
        format["json_schema"]["strict"] = True
        refused = await api.http.post("/v1/chat/completions", json=BODY | form)
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema"


async def test_min_tokens_above_all_choices_is_refused_before_the_engine() -> None:
    form = {"choice": ["ja", "nö ü"]}  # 6 bytes
    fields = {"structured_outputs": form, "min_tokens": 6}
    async with http_api() as (api, engine):
        await api.client.completions.create(model="tiny", prompt="Hi", extra_body=fields)
        with pytest.raises(openai.BadRequestError, match="7 exceeds the 6 bytes of the longest") as caught:
            await api.client.completions.create(
                model="tiny", prompt="Hi", extra_body=fields | {"min_tokens": 7}
            )
        assert caught.value.param == "min_tokens"
        assert len(engine.submitted) == 1
        await chat(api, extra_body=fields | {"min_tokens": 7})  # the model may reason before the form


async def test_a_schema_that_cannot_be_held_is_named() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    async with http_api() as (api, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(api, tools=[bad], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"
