"""Tools and reasoning through both APIs, down to a fake engine that says what a model would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from tests.helpers import grpc_api
from tests.helpers.byte_tokenizer import EOS, byte_backend, byte_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import open_api
from tests.helpers.tool_answers import (
    ADD,
    ANSWER,
    EOS_ID,
    NOW,
    TALKATIVE,
    TOKENIZER,
    USER,
    chat,
    http_api,
    prompt_of,
    say,
)
from triptych.errors import InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.output_limits import ThinkingBudget
from triptych.v1 import output_pb2
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.streams.resume import StreamState


async def test_an_answer_is_split_into_its_parts() -> None:
    async with http_api() as (api, engine):
        answer = await chat(api, tools=[ADD, NOW])
        prompt = prompt_of(engine)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "Hm"
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("add", {"a": 1}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert prompt.startswith('add({"type": "object", "properties": {"a": {"type": "integer"}}}) now(')


async def test_a_stream_adds_up_to_the_same() -> None:
    async with http_api() as (api, _):
        whole = (await chat(api, tools=[ADD, NOW])).choices[0].message
        stream = await chat(api, tools=[ADD, NOW], stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
        async with api.client.chat.completions.stream(
            model="tiny", messages=USER, tools=[ADD, NOW]
        ) as helper:
            final = (await helper.get_final_completion()).choices[0]
        counted = await chat(api, stream=True, stream_options={"include_usage": True})
        usages = [chunk.usage async for chunk in counted]
    assert usages[-1].completion_tokens_details.reasoning_tokens == len("\nHm\n")
    assert final.finish_reason == deltas[-1].finish_reason == "tool_calls"
    reasoning = [getattr(delta.delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == whole.reasoning_content == "Hm"
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.content == final.message.content
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]


async def test_a_plain_answer_to_tools_stays_as_it_is() -> None:
    async with http_api(" no <b>calls</b> \n") as (api, _):
        answer = await chat(api, tools=[ADD])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", " no <b>calls</b> \n")
    assert choice.message.tool_calls is None


async def test_without_tools_calls_stay_text() -> None:
    async with http_api("<tool_call>{}</tool_call>") as (api, engine):
        answers = [await chat(api), await chat(api, tools=[ADD], tool_choice="none")]
        prompt = prompt_of(engine)
    assert [answer.choices[0].message.content for answer in answers] == ["<tool_call>{}</tool_call>"] * 2
    assert "add" not in prompt, "tools that must not be called are not shown"


async def test_reasoning_may_be_opened_by_the_prompt_and_left_out() -> None:
    async with http_api("so\n</think>\n\nYes") as (api, engine):
        opened = {"chat_template_kwargs": {"opens": True}}
        answers = [
            await chat(api, extra_body=opened),
            await chat(api, extra_body={**opened, "include_reasoning": False}),
        ]
        await chat(api, reasoning_effort="none", extra_body=opened)
        prompt = prompt_of(engine)
    shown, hidden = (answer.choices[0].message for answer in answers)
    assert (shown.reasoning_content, shown.content) == ("so", "Yes")
    assert (getattr(hidden, "reasoning_content", None), hidden.content) == (None, "Yes")
    for answer in answers:
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("so\n")
        assert answer.system_fingerprint == "fp_000000000000"
    assert prompt.endswith("assistant:none-")


@pytest.mark.parametrize("depth", [100, 2000])
async def test_arguments_that_are_nested_deep_stay_text(depth: int) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": "[" * depth + "]" * depth},
    }
    async with http_api("so") as (api, engine):
        await chat(api, messages=[*USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        chat_prompt = prompt_of(engine)
        item = {"type": "function_call", "call_id": "c1", **call["function"]}
        await api.client.responses.create(model="tiny", input=[*USER, item])
        prompt = prompt_of(engine)
    assert json.dumps(call["function"]) in chat_prompt
    assert json.dumps(call["function"]) in prompt


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_schema_that_is_nested_deep_is_refused(choice: str) -> None:
    parameters: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        parameters = {"type": "object", "properties": {"a": parameters}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    async with http_api("so") as (api, _):
        with pytest.raises(openai.BadRequestError, match="nested deeper than the limit 64"):
            await chat(api, tools=[tool], tool_choice=choice)


async def test_value_that_a_model_nests_deep_stays_text() -> None:
    value = "[" * 3000
    written = f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    async with http_api(written, tool_call_parser="qwen3_coder") as (api, _):
        (choice,) = (await chat(api, tools=[ADD])).choices
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments) == {"a": value}


async def test_formats_can_be_named_or_turned_off() -> None:
    call = "[add(a=1)]"
    async with http_api(call, tool_call_parser="pythonic", reasoning_parser="none") as (api, _):
        (choice,) = (await chat(api, tools=[ADD])).choices
    assert [each.function.arguments for each in choice.message.tool_calls] == ['{"a": 1}']
    async with http_api(ANSWER, tool_call_parser="hermes", reasoning_parser="none") as (api, _):
        (choice,) = (await chat(api, tools=[ADD])).choices
    assert choice.message.content == "<think>\nHm\n</think>\n\nOne moment."


async def test_one_call_at_a_time() -> None:
    async with http_api() as (api, _):
        answer = await chat(api, tools=[ADD, NOW], parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"]


async def test_calls_and_their_answers_go_back_to_the_model() -> None:
    async with http_api("3") as (api, engine):
        assistant = {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "no JSON"}},
            ],
        }
        result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
        await chat(api, messages=[*USER, assistant, result], tools=[ADD])
        prompt = prompt_of(engine)
    assert prompt.endswith(
        'user: Hi\nassistant: <think>Hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>\ntool: 3 answers c1\nassistant:'
    )


async def test_an_answer_with_calls_can_be_sent_back_as_it_came() -> None:
    async with http_api() as (api, engine):
        answer = await chat(api, tools=[ADD, NOW])
        await chat(api, messages=[*USER, answer.choices[0].message.model_dump()], tools=[ADD])
        assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt_of(engine)


async def test_the_last_message_is_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "One, t"}]
    async with http_api("wo") as (api, engine):
        await chat(api, messages=messages, extra_body={"continue_final_message": True})
        assert prompt_of(engine).endswith("assistant: One, t")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        with pytest.raises(openai.BadRequestError, match="contradicts"):
            await chat(api, messages=messages, extra_body=both)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    async with http_api() as (api, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.client.post(
                "/chat/completions", body={"model": "tiny", "messages": USER} | fields, cast_to=object
            )
        assert caught.value.param == param
        await chat(api)


async def test_a_template_without_tools_is_given_them_as_text() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a"},
        {"role": "tool", "content": "noon", "tool_call_id": "b"},
    ]  # fmt: skip
    async with http_api(tokenizer=byte_tokenizer()) as (api, engine):
        answer = await chat(api, messages=turns, tools=[NOW])
        prompt = prompt_of(engine)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add", "now"]
    assert prompt.startswith("system: Be brief.\n\nYou may call")
    assert '\n{"name": "now", "description": "The time of day."}\n</tools>' in prompt
    assert prompt.endswith(
        'assistant: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\n12:00\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nassistant:"
    )


async def test_a_template_with_an_unknown_way_to_call_refuses_tools() -> None:
    unknown = byte_tokenizer(chat_template="{{ tools }}")
    async with http_api(tokenizer=unknown) as (api, _):
        with pytest.raises(openai.BadRequestError, match=r"frontend\.tool_call_parser") as caught:
            await chat(api, tools=[ADD])
        assert caught.value.param == "tools"


async def test_tools_over_grpc() -> None:
    chat: dict[str, Any] = {
        "messages": [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "name": "add", "arguments_json": '{"a": 1}'}]},
            {"role": "tool", "parts": [{"text": "3"}], "tool_call_id": "c"},
        ],
        "tools": [{"name": "add", "parameters_json": '{"type": "object"}'}, {"name": "now"}],
    }
    async with (
        FakeEngine(say(ANSWER), model=TALKATIVE) as engine,
        grpc_api.open_api(engine, tokenizer=TOKENIZER) as api,
    ):
        calls: dict[int, list[str]] = {}
        reasoning = content = ""
        async for message in api.generation.StreamGenerate(grpc_api.ask(chat=chat)):
            output = message.output
            reasoning += output.reasoning
            content += output.text
            for call in output.tool_calls:
                calls.setdefault(call.index, [call.name, ""])[1] += call.arguments_json
            if message.HasField("finished"):
                assert message.finished.usage.num_reasoning_tokens == len("\nHm\n")
            if output.finish_reason:
                assert output.finish_reason == output_pb2.FINISH_REASON_TOOL_CALLS
                assert output.eos_token_id == EOS_ID
        prompt = prompt_of(engine)
    assert (reasoning, content) == ("Hm", "One moment.")
    assert calls == {0: ["add", '{"a": 1}'], 1: ["now", "{}"]}
    assert prompt.startswith('add({"type": "object"}) now(')
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\ntool: 3 answers c\n' in prompt


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"tools": [{"name": "a b"}]}, r"chat\.tools\[0\]\.name"),
        ({"tools": [{"name": "a", "parameters_json": "["}]}, r"chat\.tools\[0\]\.parameters_json"),
        ({"tool_choice": {"tool_name": "a"}}, r"chat\.tool_choice"),
        ({"tool_choice": {"mode": 9}}, r"chat\.tool_choice\.mode"),
        ({"reasoning_effort": 9}, r"chat\.reasoning_effort"),
    ],
)
async def test_what_is_wrong_with_tools_is_named_over_grpc(chat: dict[str, Any], field: str) -> None:
    chat = {"messages": [{"role": "user", "parts": [{"text": "Hi"}]}]} | chat
    async with FakeEngine() as engine, grpc_api.open_api(engine, tokenizer=TOKENIZER) as api:
        error = await grpc_api.error_of(api.generation.StreamGenerate(grpc_api.ask(chat=chat)))
    assert isinstance(error, InvalidRequest)
    assert re.match(f"{field}: ", str(error))


def thinking_tokenizer(chat_template: str = TOKENIZER.chat_template or "") -> Tokenizer:
    """As `TOKENIZER`, with one token for each mark of the reasoning."""
    backend = byte_backend()
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return Tokenizer(backend, {"chat_template": chat_template})


def continued(*messages: tuple[str, str]) -> dict[str, Any]:
    """Return fields of a conversation, its last message continued."""
    return {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }


@pytest.mark.parametrize(
    ("turn", "is_open"),
    [
        ("<think>Let me", True),
        ("Well. <think>Let me", True),
        ("<think>Let me</think>It", False),
        ("<think>a</think><think>b", True),
        ("It", False),
    ],
)
async def test_a_continued_turn_goes_on_with_what_it_has_opened(turn: str, is_open: bool) -> None:
    tokenizer = thinking_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + EOS + "{% endfor %}"
    )
    fields = continued(("user", "What is <think>?"), ("assistant", turn))
    body: Any = {"model": "tiny", "messages": fields["messages"], "max_tokens": 50}
    kept: Any = {"stream_options": {"include_event_ids": True}}
    expected = ("see.", "Yes") if is_open else ("", "see.</think>Yes")
    async with (
        FakeEngine(say("see.</think>Yes"), model=replace(TALKATIVE, vocab_size=1000)) as engine,
        frontend_core(engine, tokenizer=tokenizer, keep_s=10.0, reasoning_parser="think") as core,
        open_api(core.generator) as api,
    ):
        message = (await chat(api, **fields)).choices[0].message
        deltas = [chunk.choices[0].delta async for chunk in await chat(api, stream=True, **kept, **fields)]
        blocks = (await api.post("/v1/messages", json.dumps(body))).json()["content"]
    assert (getattr(message, "reasoning_content", None) or "", message.content) == expected
    streamed = (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
    )
    assert streamed == expected
    assert ("".join(block.get("thinking", "") for block in blocks), blocks[-1]["text"]) == expected
    prompt = tokenizer.decode(engine.submitted[0].prompt_token_ids.tolist(), skip_special_tokens=False)
    assert prompt.endswith(f"assistant: {turn}")
    state = StreamState.from_bytes(engine.submitted[1].frontend_state).raw_chat
    assert state is not None, "another frontend goes on with the stream"
    model = TextModel(tokenizer, {}, Path(), reasoning_parser="think")
    split = model.split_answer(state, engine.submitted[1].prompt_token_ids)
    assert split is not None
    assert split.is_reasoning == is_open


async def test_a_thinking_budget_reaches_the_engine_with_its_tokens() -> None:
    tokenizer = thinking_tokenizer()
    opening_id, closing_id = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert opening_id is not None
    assert closing_id is not None
    opened = {"chat_template_kwargs": {"opens": True}}
    model = replace(TALKATIVE, vocab_size=1000)
    async with (
        FakeEngine(say("Yes"), model=model) as engine,
        frontend_core(engine, tokenizer=tokenizer) as core,
        open_api(core.generator) as api,
    ):
        await chat(api, extra_body={"thinking_token_budget": 5})
        await chat(api, extra_body={"thinking_token_budget": 0, **opened})
        for prompt in ("<think>a", "<think>a</think>b"):
            body: dict[str, Any] = {"thinking_token_budget": 7}
            await api.client.completions.create(model="tiny", prompt=prompt, extra_body=body)
        await chat(api, extra_body={"thinking_token_budget": -1})
    assert [choice.sampling.thinking_token_budget for choice in engine.submitted] == [
        ThinkingBudget(5, opening_id, closing_id, is_open=False),
        ThinkingBudget(0, opening_id, closing_id, is_open=True),
        ThinkingBudget(7, opening_id, closing_id, is_open=True),
        ThinkingBudget(7, opening_id, closing_id, is_open=False),
        None,
    ]
    async with (
        FakeEngine(say("Yes"), model=model) as engine,
        grpc_api.open_api(engine, tokenizer=tokenizer) as grpc,
    ):
        length = {"thinking_token_budget": 9}
        await grpc.generation.Generate(grpc_api.ask(text="a", length=length))
    (choice,) = engine.submitted
    assert choice.sampling.thinking_token_budget == ThinkingBudget(9, opening_id, closing_id, is_open=False)


@pytest.mark.parametrize(
    ("parser", "why"), [("auto", "are not one token each"), ("none", "not known how this model thinks")]
)
async def test_a_thinking_budget_that_cannot_be_kept_is_refused(parser: str, why: str) -> None:
    async with http_api("Yes", reasoning_parser=parser) as (api, _):
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await chat(api, extra_body={"thinking_token_budget": 5})
    assert caught.value.param == "thinking_token_budget"
