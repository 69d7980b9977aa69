"""Refused requests and their messages: field, value and limit, all violations at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.frontend import raw_request
from triptych.errors import ContextLengthExceeded, FeatureDisabled, InvalidRequest, ModelError
from triptych.types.facts import ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, OutputKind, SamplingParams
from triptych.types.structured import StructuredOutputs
from triptych.types.submit import EngineLimits, ModelTerms, RequestHead
from triptych.v1 import sampling_pb2
from triptych_services.frontend.requests.parse import fit_to_context, parse, write_messages
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.requests.sampling import check_defaults

VOCAB_SIZE, MAX_MODEL_LEN = 300, 64
FACTS = ModelFacts(
    "tiny", ModelIdentity("f"), VOCAB_SIZE, MAX_MODEL_LEN, (299,), "float32", "float32", "none"
)
TERMS = ModelTerms(FACTS, EngineLimits(), MAX_MODEL_LEN)
FCFS = ModelTerms(FACTS, EngineLimits(has_priorities=False), MAX_MODEL_LEN)


def sampling_of(given: dict[str, Any], defaults: dict[str, float] | None = None) -> SamplingParams:
    return parse(raw_request(sampling=given), TERMS, defaults or {}).sampling


def violations_of(raw: RawRequest, terms: ModelTerms = TERMS) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw, terms, {})
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("name", "value", "path", "words"),
    [
        ("temperature", math.nan, "temperature", ["nan", "finite"]),
        ("temperature", math.inf, "temperature", ["inf", "finite"]),
        ("temperature", -1, "temperature", ["-1", "below the limit 0"]),
        ("temperature", 3.0, "temperature", ["3", "above the limit 2"]),
        ("temperature", True, "temperature", ["True", "not a number"]),
        ("temperature", "hot", "temperature", ["'hot'", "not a number"]),
        ("top_p", 0, "top_p", ["0 must be above 0"]),
        ("top_p", 1.5, "top_p", ["1.5", "above the limit 1"]),
        ("top_k", -2, "top_k", ["-2", "below the limit -1"]),
        ("top_k", 1 << 31, "top_k", ["2147483648", "above the limit 2147483647"]),
        ("min_p", -0.1, "min_p", ["-0.1", "below the limit 0"]),
        ("presence_penalty", 2.5, "presence_penalty", ["2.5", "above the limit 2"]),
        ("frequency_penalty", -2.5, "frequency_penalty", ["-2.5", "below the limit -2"]),
        ("repetition_penalty", 0.0, "repetition_penalty", ["0 is below the limit 0.01"]),
        ("repetition_penalty", 1e-30, "repetition_penalty", ["1e-30 is below the limit 0.01"]),
        ("repetition_penalty", 101, "repetition_penalty", ["101 is above the limit 100"]),
        ("repetition_penalty", 1e39, "repetition_penalty", ["1e+39", "32-bit float"]),
        ("n", 0, "n", ["0", "below the limit 1"]),
        ("n", 16385, "n", ["16385", "above the limit 16384"]),
        ("n", 1.5, "n", ["1.5", "not an integer"]),
        ("max_tokens", 0, "max_tokens", ["0", "below the limit 1"]),
        ("min_tokens", -1, "min_tokens", ["-1", "below the limit 0"]),
        ("seed", 1 << 64, "seed", ["18446744073709551616", "above the limit 18446744073709551615"]),
        ("seed", -1, "seed", ["-1", "below the limit 0"]),
        ("logprobs", 21, "logprobs", ["21", "above the limit 20"]),
        ("prompt_logprobs", 21, "prompt_logprobs", ["21", "above the limit 20"]),
        ("logprobs", -2, "logprobs", ["-2", "below the limit 0"]),
        ("stop", "END", "stop", ["'END'", "list of strings"]),
        ("stop", ["a", ""], "stop[1]", ["empty string"]),
        ("stop", ["a", 7], "stop[1]", ["7", "not text"]),
        ("stop", ["x" * 257], "stop[0]", ["257", "limit 256"]),
        ("stop", [str(i) for i in range(33)], "stop", ["33", "limit 32"]),
        ("stop", ["\ud800"], "stop[0]", ["surrogate"]),
        ("stop_token_ids", [5, 300], "stop_token_ids[1]", ["300", "0..299"]),
        ("allowed_token_ids", [], "allowed_token_ids", ["empty"]),
        ("allowed_token_ids", [-1], "allowed_token_ids[0]", ["-1", "0..299"]),
        ("allowed_token_ids", [10**7], "allowed_token_ids[0]", ["10000000", "0..299"]),
        ("logit_bias", {"300": 1.0}, "logit_bias[300]", ["300", "0..299"]),
        ("logit_bias", dict.fromkeys(range(301), 1.0), "logit_bias", ["301 is above the limit 300"]),
        ("stop_token_ids", [1] * 129, "stop_token_ids", ["129 is above the limit 128"]),
        ("allowed_token_ids", [1] * 8193, "allowed_token_ids", ["8193 is above the limit 8192"]),
        ("logit_bias", {"x": 1.0}, "logit_bias[x]", ["'x'", "not a token id"]),
        ("logit_bias", {7: math.nan}, "logit_bias[7]", ["nan", "finite"]),
        ("ignore_eos", 1, "ignore_eos", ["1", "true or false"]),
        ("colour", "red", "colour", ["no such"]),
    ],
)
def test_bad_sampling_field_names_field_value_and_limit(
    name: str, value: Any, path: str, words: list[str]
) -> None:
    found = violations_of(raw_request(sampling={name: value}))
    assert list(found) == [path]
    for word in words:
        assert word in found[path]


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"prompt": None}, "prompt", ["no prompt"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": "half \ud83d"}, "prompt", ["position 5", "surrogate"]),
        ({"prompt": [1, 2, 999999]}, "prompt[2]", ["999999", "0..299"]),
        ({"prompt": [1, -2]}, "prompt[1]", ["-2", "0..299"]),
        ({"prompt": [1, True]}, "prompt[1]", ["True", "not a token id"]),
        ({"prompt": [1] * 64}, "prompt", ["65 tokens", "maximum context length is 64 tokens", "at most 63"]),
        ({"prompt": [999] + [1] * 60, "truncate_prompt_tokens": 61}, "prompt[0]", ["999"]),
        ({"prompt": [1] * 100, "truncate_prompt_tokens": 64}, "prompt", ["64 in the prompt"]),
        ({"prompt": RawChat([])}, "prompt", ["empty"]),
        ({"prompt": RawChat([{"role": "", "content": "x"}])}, "prompt[0].role", ["role"]),
        ({"prompt": RawChat([{"role": "user", "content": 5}])}, "prompt[0].content", ["5", "not text"]),
        (
            {"prompt": RawChat([{"role": "user", "content": "x"}], template_kwargs={"messages": 1})},
            "template_kwargs.messages",
            ["name"],
        ),
        ({"prompt": RawChat([{"role": "user", "content": "x"}]), "echo": True}, "echo", ["chat"]),
        ({"request_id": "x" * 129}, "request_id", ["128 bytes"]),
        ({"request_id": "a\nb"}, "request_id", ["'a\\nb'", "printable"]),
        ({"tenant": "x" * 257}, "tenant", ["257", "256"]),
        ({"cache_salt": "\ud800"}, "cache_salt", ["surrogate"]),
        ({"priority": 1 << 31}, "priority", ["2147483648"]),
        ({"truncate_prompt_tokens": 1 << 64}, "truncate_prompt_tokens", ["above the limit 2147483647"]),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["0", "limit 1"]),
        ({"deadline_s": 0.0}, "deadline_s", ["0 is", "above 0"]),
        ({"deadline_s": math.nan}, "deadline_s", ["nan", "above 0"]),
        ({"deadline_s": 2e9}, "deadline_s", ["2e+09", "at most 1e+09"]),
        ({"sampling": {"n": 3, "temperature": 0.0}}, "n", ["3 choices", "greedy", "limit is 1"]),
        ({"sampling": {"max_tokens": 4, "min_tokens": 5}}, "min_tokens", ["5", "max_tokens 4"]),
        (
            {"sampling": {"min_tokens": 1, "allowed_token_ids": [299, 7], "stop_token_ids": [7]}},
            "allowed_token_ids",
            ["min_tokens 1", "allow another"],
        ),
        ({"sampling": {"stop": ["x"], "detokenize": False}}, "stop", ["detokenize"]),
        ({"sampling": {"detokenize": False}, "echo": True}, "echo", ["detokenize"]),
    ],
)
def test_bad_request_names_field_value_and_limit(fields: dict[str, Any], path: str, words: list[str]) -> None:
    found = violations_of(raw_request(**fields))
    assert list(found) == [path]
    for word in words:
        assert word in found[path]


def test_all_violations_are_reported_at_once() -> None:
    raw = RawRequest(
        api="test",
        prompt=[7, 300],
        sampling={"temperature": 3.0, "top_p": 0, "max_tokens": 0, "logprobs": 21},
        head=RequestHead("\x07", 5),
        paths={"prompt": "token_ids.ids", "temperature": "sampling.temperature", "logprobs": "top_logprobs"},
    )
    assert set(violations_of(raw, FCFS)) == {
        "token_ids.ids[1]",
        "sampling.temperature",
        "top_p",
        "max_tokens",
        "top_logprobs",
        "priority",
        "request_id",
    }


def test_no_output_is_asked_for_only_with_the_prompt() -> None:
    for given in (
        {"sampling": {"max_tokens": 0, "prompt_logprobs": 0}},
        {"sampling": {"max_tokens": 0}, "echo": True},
    ):
        valid = parse(raw_request(**given), TERMS, {})
        assert fit_to_context(valid, 3, MAX_MODEL_LEN).max_tokens == 0


def test_priority_is_refused_only_where_the_engine_has_none() -> None:
    assert "has no priorities" in violations_of(raw_request(priority=1), FCFS)["priority"]
    assert parse(raw_request(priority=1), TERMS, {}).raw.head.priority == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"prompt_logprobs": -1},
        {"logprobs": -1},
    ],
)
def test_unsupported_sampling_is_refused_by_name(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    with pytest.raises(FeatureDisabled, match=f"^sampling.{name}: ") as caught:
        parse(raw_request(sampling=sampling, paths={name: f"sampling.{name}"}), TERMS, {})
    assert caught.value.features == (f"sampling.{name}",)


def test_every_unsupported_field_is_named() -> None:
    raw = raw_request(unsupported=("chat.tools",), sampling={"logprobs": -1})
    with pytest.raises(FeatureDisabled, match=r"^chat\.tools, logprobs: "):
        parse(raw, TERMS, {})


def test_violations_come_before_unsupported_features() -> None:
    assert list(violations_of(raw_request(unsupported=("chat.tools",), sampling={"top_p": 0}))) == ["top_p"]


def test_good_fields_arrive_as_given() -> None:
    given = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "seed": (1 << 64) - 1,
        "stop": ["a", "b", "a"],
        "stop_token_ids": [9, 3, 9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 0,
        "logit_bias": {"7": 500, 3: -1},
        "allowed_token_ids": [5, 1],
        "detokenize": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    expected = given | {
        "stop": ("a", "b"),
        "stop_token_ids": (3, 9),
        "logit_bias": ((3, -1.0), (7, 100.0)),
        "allowed_token_ids": (1, 5),
        "output_kind": OutputKind.FINAL_ONLY,
    }
    raw = raw_request(sampling=given, output_kind=OutputKind.FINAL_ONLY)
    assert parse(raw, TERMS, {}).sampling == SamplingParams(**expected)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, spec in SAMPLING_FIELDS.items()
        if spec.trial is not None and spec.kind is not FieldKind.WORDS  # they are tokens at the worker
    ],
)
def test_trial_values_of_the_table_are_valid(name: str) -> None:
    trial = SAMPLING_FIELDS[name].trial
    given = dict(trial) if name == "logit_bias" else trial
    parsed = getattr(sampling_of({name: given}), name)
    assert parsed == (pytest.approx(trial) if isinstance(trial, float) else trial)


def test_allowed_ids_may_all_be_end_tokens() -> None:
    assert sampling_of({"allowed_token_ids": [299]}).allowed_token_ids == (299,)
    assert sampling_of({"allowed_token_ids": [299, 8], "min_tokens": 3}).min_tokens == 3


def test_the_limits_of_repetition_penalty_are_accepted() -> None:
    assert sampling_of({"repetition_penalty": 0.01}).repetition_penalty == pytest.approx(0.01)
    assert sampling_of({"repetition_penalty": 100}).repetition_penalty == 100


def test_long_prompt_error_has_machine_readable_numbers() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        parse(raw_request([1] * 70), TERMS, {})
    assert caught.value.metadata == {
        "field": "prompt",
        "value": "71",
        "limit": "64",
        "num_prompt_tokens": "70",
        "max_tokens": "1",
    }


def test_long_prompt_is_reported_with_other_violations() -> None:
    found = violations_of(raw_request([1] * 70, sampling={"top_p": 0}))
    assert set(found) == {"prompt", "top_p"}


def test_what_would_be_rounded_to_an_excluded_limit_stays_above_it() -> None:
    assert sampling_of({"top_p": 1e-46}).top_p == 2.0**-149


def test_biases_of_any_size_are_clamped() -> None:
    biases = {"1": 1e300, "2": -(10**400), "3": 5}
    assert sampling_of({"logit_bias": biases}).logit_bias == ((1, 100.0), (2, -100.0), (3, 5.0))


def test_floats_are_rounded_to_float32() -> None:
    carried = sampling_pb2.SamplingParams(temperature=0.7).temperature
    assert sampling_of({"temperature": 0.7}) == sampling_of({"temperature": carried})


def test_checkpoint_defaults_fill_only_what_the_client_left_out() -> None:
    defaults = {"temperature": 0.5, "top_k": 40}
    assert sampling_of({}, defaults).temperature == 0.5
    chosen = sampling_of({"temperature": 1.0, "top_k": None}, defaults)
    assert (chosen.temperature, chosen.top_k) == (1.0, 40)


def test_checkpoint_defaults_out_of_range_stop_the_boot() -> None:
    assert check_defaults({"top_p": 0.5}) == {"top_p": 0.5}
    with pytest.raises(ModelError, match=r"generation_config.json: temperature: 7 is above the limit 2"):
        check_defaults({"temperature": 7.0})


@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens", "given", "expected"),
    [
        ("text", 10, {}, 16),
        ([1], 1, {}, 16),
        ("text", 60, {}, 4),  # the default is ours to cut, what a client asks for is not
        (RawChat([{"role": "user", "content": "x"}]), 10, {}, 54),
        ("text", 10, {"max_tokens": 54}, 54),
        ("text", 63, {"max_tokens": 1}, 1),
    ],
)
def test_max_tokens_fill_the_context_as_the_prompt_leaves_it(
    prompt: Any, num_prompt_tokens: int, given: dict[str, Any], expected: int
) -> None:
    valid = parse(raw_request(prompt, sampling=given), TERMS, {})
    assert fit_to_context(valid, num_prompt_tokens, MAX_MODEL_LEN).max_tokens == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "given", "message"),
    [
        (
            60,
            {"max_tokens": 5},
            "max_tokens: This model's maximum context length is 64 tokens. However, you "
            "requested 65 tokens (60 in the prompt, 5 in the completion); ",
        ),
        (
            64,
            {},
            "prompt: This model's maximum context length is 64 tokens. However, you requested 65 tokens "
            "(64 in the prompt, 1 in the completion); reduce the prompt to at most 63 tokens",
        ),
        (0, {}, "prompt: the prompt has no tokens"),
        (60, {"min_tokens": 5}, "min_tokens: 5 exceeds max_tokens, here 4"),
    ],
)
def test_context_overflow_names_both_numbers(
    num_prompt_tokens: int, given: dict[str, Any], message: str
) -> None:
    valid = parse(raw_request(sampling=given), TERMS, {})
    with pytest.raises(InvalidRequest) as caught:
        fit_to_context(valid, num_prompt_tokens, MAX_MODEL_LEN)
    assert str(caught.value).startswith(message)


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": ["x" * 5000, {"b": "y"}]}},
}


@pytest.mark.parametrize(
    ("message", "least"),
    [
        ({"content": "x" * 5000}, 5000),
        ({"content": None, "reasoning_content": "x" * 5000}, 5000),
        ({"content": "x", "name": "x" * 5000}, 5000),
        ({"content": "x", "tool_calls": [CALL]}, 5000),
        ({"role": "x" * 5000, "content": "x"}, 5000),
        ({"content": "x", "tool_calls": [{"function": {"arguments": [1] * 5000}}]}, 5000),
        ({"content": "x", "tool_calls": [{"function": {"arguments": {"x" * 5000: 1}}}]}, 5000),
    ],
)
def test_all_texts_of_a_message_count_as_its_size(message: dict[str, Any], least: int) -> None:
    plain = RawChat([{"role": "user", "content": "x"}]).size
    size = RawChat([{"role": "user", **message}]).size
    assert least < size < least + plain + 100
    assert RawChat([{"role": "user", **message}] * 3).size == 3 * size


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ["x" * 4999]},
        {"logit_bias": dict.fromkeys(range(5000), 1)},
        {"allowed_token_ids": list(range(5000))},
        {"structured_outputs": StructuredOutputs(grammar="x" * 5000)},
        {"bad_words": [""] * 5000},
        {"structured_outputs": StructuredOutputs(choice=[""] * 5000)},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_all_texts_and_lists_of_sampling_count_as_its_size(sampling: dict[str, Any]) -> None:
    assert raw_request("x", sampling=sampling).size == 5001


def test_faults_of_messages_are_named_up_to_a_limit() -> None:
    messages = [{"role": "", "content": "x"}] * 100
    for given in (messages, write_messages(messages)):
        names = violations_of(raw_request(RawChat(given)))
        assert list(names) == [f"prompt[{place}].role" for place in range(64)]


def test_an_operator_may_allow_more_biases() -> None:
    raw = raw_request(sampling={"logit_bias": dict.fromkeys(range(10), 1.0)})
    assert len(parse(raw, TERMS, {}, max_biases=10).sampling.logit_bias) == 10
    with pytest.raises(InvalidRequest, match="logit_bias: 10 is above the limit 9"):
        parse(raw, TERMS, {}, max_biases=9)
