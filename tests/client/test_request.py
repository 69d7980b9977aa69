"""Prompts in all their forms, and which sampling fields travel."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from triptych.client.request import (
    DEFAULT_OPTIONS,
    RequestOptions,
    build_request,
    split_conversations,
    split_prompts,
)
from triptych.errors import InvalidRequest
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.v1 import common_pb2

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("one", 1),
        ([1, 2, 3], 1),
        (list(np.arange(3)), 1),
        (HELLO, 1),
        ([], 0),
        (["one", "two"], 2),
        ([[1, 2], [3]], 2),
        ([[]], 1),
        ([HELLO, HELLO], 2),
        (["one", [1], HELLO], 3),
    ],
)
def test_one_prompt_and_many_are_told_apart(given, count):
    assert len(split_prompts(given)) == count


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (3, "prompts"),
        (b"bytes", "prompts"),
        (["one", 2.5], r"prompts\[1\]"),
        ([1, "two"], "prompt"),
        ([[1, 2], [3, None]], r"prompts\[1\]"),
        ([{"role": "user"}], r"prompt.messages\[0\]"),
        ([[{"role": "user", "content": 5}]], r"prompts\[0\].messages\[0\].content"),
        ([{"role": "user", "content": "x", "tool_calls": "y"}], r"prompt.messages\[0\]"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(given, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        split_prompts(given)


def test_a_long_wrong_argument_is_shown_by_its_beginning():
    with pytest.raises(InvalidRequest) as caught:
        split_prompts([["a", 1] * 10_000])
    assert len(str(caught.value)) < 500


def test_chat_refuses_what_is_no_conversation():
    assert len(split_conversations([HELLO, HELLO])) == 2
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        split_conversations([HELLO, "hello"])


def test_the_prompt_goes_into_its_own_place():
    assert build_request("text", None, DEFAULT_OPTIONS).text == "text"
    assert list(build_request([1, 2], None, DEFAULT_OPTIONS).token_ids.ids) == [1, 2]
    assert build_request(HELLO, None, DEFAULT_OPTIONS).chat.messages[0].content == "hello"
    assert build_request([], None, DEFAULT_OPTIONS).WhichOneof("prompt") == "token_ids"


def test_no_sampling_params_sends_nothing():
    assert not build_request("text", None, DEFAULT_OPTIONS).HasField("sampling")


def test_sampling_params_are_sent_as_they_stand_defaults_included():
    message = build_request("text", SamplingParams(), DEFAULT_OPTIONS).sampling
    for field in fields(SamplingParams):
        default = getattr(SamplingParams(), field.name)
        if field.name != "output_kind" and isinstance(default, int | float) and not isinstance(default, bool):
            assert message.HasField(field.name), field.name
            assert getattr(message, field.name) == default
    assert not message.HasField("seed")
    assert not message.HasField("allowed_token_ids")


def test_a_mapping_sends_only_what_it_names():
    message = build_request("text", {"temperature": 0.0, "max_tokens": None}, DEFAULT_OPTIONS).sampling
    assert [field.name for field, _ in message.ListFields()] == ["temperature"]
    with pytest.raises(InvalidRequest, match=r"sampling\.temprature: no such field"):
        build_request("text", {"temprature": 0.0}, DEFAULT_OPTIONS)


def test_lists_strings_and_dicts_are_taken_where_tuples_are_declared():
    params = SamplingParams(
        stop="END", stop_token_ids=[2], logit_bias={5: -1.5}, allowed_token_ids=[5, 6], bad_words=["x"]
    )
    message = build_request("text", params, DEFAULT_OPTIONS).sampling
    assert list(message.stop) == ["END"]
    assert list(message.stop_token_ids) == [2]
    assert dict(message.logit_bias) == {5: -1.5}
    assert list(message.allowed_token_ids.ids) == [5, 6]
    assert list(message.bad_words) == ["x"]


def test_an_empty_list_of_allowed_tokens_travels_for_the_server_to_refuse():
    message = build_request("text", SamplingParams(allowed_token_ids=[]), DEFAULT_OPTIONS).sampling
    assert message.HasField("allowed_token_ids")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=-1), "sampling.max_tokens"),
        (SamplingParams(temperature="hot"), "sampling.temperature"),
        (SamplingParams(seed=1 << 64), "sampling.seed"),
        (SamplingParams(stop_token_ids=[-1]), "sampling.stop_token_ids"),
        (SamplingParams(logit_bias={-1: 1.0}), "sampling.logit_bias"),
        (SamplingParams(stop=[3]), "sampling.stop"),
        ("greedy", "sampling_params"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_name(params, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        build_request("text", params, DEFAULT_OPTIONS)


def test_a_token_id_that_is_no_u32_is_refused():
    with pytest.raises(InvalidRequest, match=r"^prompt: .*-1"):
        build_request([1, -1], None, DEFAULT_OPTIONS)


def test_options_travel():
    options = RequestOptions("r1", "m", -3, "me", "salt", 5, OutputKind.FINAL_ONLY)
    request = build_request("text", None, options)
    assert (request.request_id, request.model, request.priority, request.tenant) == ("r1", "m", -3, "me")
    assert (request.cache_salt, request.truncate_prompt_tokens) == ("salt", 5)
    assert request.output_kind == common_pb2.OUTPUT_KIND_FINAL_ONLY
    assert not build_request("text", None, DEFAULT_OPTIONS).HasField("truncate_prompt_tokens")
