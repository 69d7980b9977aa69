"""Prompts in all their forms, and which sampling fields travel."""

from __future__ import annotations

from dataclasses import fields

import pytest

from triptych.client.conversation import ChatOptions
from triptych.client.request import (
    DEFAULT_OPTIONS,
    RequestOptions,
    build_generation,
)
from triptych.errors import InvalidRequest
from triptych.types.sampling import SamplingParams
from triptych.wire.generation import SAMPLING_PATHS

HELLO = [{"role": "user", "content": "hello"}]


def test_the_prompt_goes_into_its_own_place():
    assert build_generation("text", None, DEFAULT_OPTIONS).text.text == "text"
    assert list(build_generation([1, 2], None, DEFAULT_OPTIONS).token_ids.ids) == [1, 2]
    assert build_generation(HELLO, None, DEFAULT_OPTIONS).chat.messages[0].parts[0].text == "hello"
    assert build_generation([], None, DEFAULT_OPTIONS).WhichOneof("prompt") == "token_ids"


def test_no_sampling_params_sends_nothing():
    message = build_generation("text", None, DEFAULT_OPTIONS)
    assert not message.HasField("sampling")
    assert not message.HasField("length")


def test_sampling_params_are_sent_as_they_stand_defaults_included():
    message = build_generation("text", SamplingParams(), DEFAULT_OPTIONS)
    for field in fields(SamplingParams):
        default = getattr(SamplingParams(), field.name)
        if field.name != "output_kind" and isinstance(default, int | float) and not isinstance(default, bool):
            section, name = SAMPLING_PATHS[field.name].split(".")
            assert getattr(message, section).HasField(name), field.name
            assert getattr(getattr(message, section), name) == default
    assert not message.sampling.HasField("seed")
    assert not message.sampling.HasField("allowed_token_ids")


def test_a_mapping_sends_only_what_it_names():
    message = build_generation("text", {"temperature": 0.0, "max_tokens": None}, DEFAULT_OPTIONS)
    assert [field.name for field, _ in message.sampling.ListFields()] == ["temperature"]
    assert not message.HasField("length")
    with pytest.raises(InvalidRequest, match=r"sampling\.temprature: no such field"):
        build_generation("text", {"temprature": 0.0}, DEFAULT_OPTIONS)


def test_lists_strings_and_dicts_are_taken_where_tuples_are_declared():
    params = SamplingParams(
        stop="END",
        stop_token_ids=[2],
        logit_bias={5: -1.5},
        allowed_token_ids=[5, 6],
        bad_words=["x"],
        repetition_detection={"max_pattern_size": 2, "min_count": 3},
    )
    generation = build_generation("text", params, DEFAULT_OPTIONS)
    assert list(generation.length.stop) == ["END"]
    assert list(generation.length.stop_token_ids) == [2]
    message = generation.sampling
    assert dict(message.logit_bias) == {5: -1.5}
    assert list(message.allowed_token_ids.ids) == [5, 6]
    assert list(message.bad_words) == ["x"]
    detection = generation.length.repetition_detection
    assert (detection.max_pattern_size, detection.min_count, detection.min_pattern_size) == (2, 3, 1)


def test_an_empty_list_of_allowed_tokens_travels_for_the_server_to_refuse():
    message = build_generation("text", {"allowed_token_ids": []}, DEFAULT_OPTIONS).sampling
    assert message.HasField("allowed_token_ids")
    with pytest.raises(ValueError, match="allowed_token_ids: the empty list"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -1}, "length.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"seed": 1 << 64}, "sampling.seed"),
        (SamplingParams(max_tokens=1.5), "length.max_tokens"),
        (SamplingParams(stop_token_ids=[-1]), "length.stop_token_ids"),
        (SamplingParams(logit_bias={-1: 1.0}), "sampling.logit_bias"),
        (SamplingParams(stop=[3]), "length.stop"),
        (SamplingParams(repetition_detection={"size": 3}), "length.repetition_detection"),
        (SamplingParams(repetition_detection=3), "length.repetition_detection"),
        ("greedy", "sampling_params"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_name(params, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        build_generation("text", params, DEFAULT_OPTIONS)


def test_a_token_id_that_is_no_u32_is_refused():
    with pytest.raises(InvalidRequest, match=r"^prompt: .*-1"):
        build_generation([1, -1], None, DEFAULT_OPTIONS)


def test_options_travel():
    options = RequestOptions(
        "r1", "m", -3, "me", "salt", 5, whole_choices=True, emitted={1: [7, 8]}, adapter="sql"
    )
    generation = build_generation("text", None, options)
    assert (generation.model, generation.priority, generation.tenant) == ("m", -3, "me")
    assert generation.adapter == "sql"
    assert (generation.cache.salt, generation.truncation.max_tokens) == ("salt", 5)
    assert generation.response.whole_choices
    assert [(each.index, list(each.token_ids)) for each in generation.emitted] == [(1, [7, 8])]
    assert not build_generation("text", None, DEFAULT_OPTIONS).HasField("truncation")


def test_logprobs_come_with_their_bytes():
    generation = build_generation("text", SamplingParams(logprobs=2, prompt_logprobs=-1), DEFAULT_OPTIONS)
    assert (generation.response.logprobs.top, generation.response.logprobs.with_bytes) == (2, True)
    assert generation.response.prompt_logprobs.WhichOneof("candidates") == "whole_vocabulary"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_calls_are_sent() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    chosen = {"type": "function", "function": {"name": "add"}}
    options = RequestOptions(
        chat=ChatOptions([ADD], chosen, False, {"enable_thinking": False}, add_generation_prompt=False)
    )
    chat = build_generation(messages, None, options).chat
    assert [part.text for part in chat.messages[0].parts] == ["a", "b"]
    assert (chat.messages[1].reasoning, chat.messages[1].tool_calls[0].name) == ("Hm", "add")
    assert chat.messages[2].tool_call_id == "c"
    assert (chat.tools[0].name, chat.tools[0].parameters_json) == ("add", '{"type": "object"}')
    assert chat.tool_choice.tool_name == "add"
    assert (chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == (True, False)
    assert (chat.HasField("add_generation_prompt"), chat.add_generation_prompt) == (True, False)
    assert chat.template_kwargs_json == '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ChatOptions([{"name": "add"}]), r"tools\[0\]"),
        (ChatOptions([ADD], "perhaps"), "tool_choice"),
        (ChatOptions(template_kwargs={"a": object()}), "chat_template_kwargs"),
    ],
)
def test_options_that_cannot_be_sent_are_named(options: ChatOptions, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        build_generation(HELLO, None, RequestOptions(chat=options))
