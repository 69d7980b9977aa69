"""Sampling parameters that may be changed, under vLLM's names."""

from __future__ import annotations

import copy
import pickle

import pytest

import triptych
from triptych.vllm.sampling_params import (
    GuidedDecodingParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

# Every parameter of vLLM's (0.33, and some that older programs have) with a value that asks for nothing.
DEFAULTS = {
    "n": 1, "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None,
    "stop_token_ids": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None,
    "prompt_logprobs": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": None,
    "logprob_token_ids": None, "flat_logprobs": False, "detokenize": True, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE, "stream_interval": None, "skip_clone": False,
    "output_text_buffer_length": 0, "structured_outputs": None, "guided_decoding": None, "logit_bias": None,
    "allowed_token_ids": None, "extra_args": None, "bad_words": None, "skip_reading_prefix_cache": None,
    "thinking_token_budget": None, "repetition_detection": None, "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None, "logits_processors": None, "truncate_prompt_tokens": None,
}  # fmt: skip


def test_vllms_defaults_are_ours():
    assert SamplingParams(**DEFAULTS) == SamplingParams()
    assert SamplingParams.from_optional(**DEFAULTS).frozen() == triptych.SamplingParams()


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if value is not None])
def test_none_is_the_default(name):
    if name == "max_tokens":  # of which None has a meaning
        assert SamplingParams(max_tokens=None).max_tokens is None
    else:
        assert SamplingParams(**{name: None}) == SamplingParams()


def test_changes_are_taken_and_checked():
    params = SamplingParams(temperature=0.8)
    params.max_tokens = 8
    params.stop = "x"
    params.seed = -1
    params.logit_bias = {"5": 1.0}
    params.truncate_prompt_tokens = 3
    assert (params.max_tokens, params.stop, params.seed, params.logit_bias) == (8, ("x",), None, ((5, 1.0),))
    for name, value, kind, told in (
        ("temperature", 9, ValueError, "temperature: 9 is above the limit 2"),
        ("max_token", 9, TypeError, "max_token"),
        ("best_of", 4, ValueError, "best_of: 4 is not served; ask for n"),
        ("logits_processors", [len], ValueError, "logits_processors: .* is not served"),
    ):
        with pytest.raises(kind, match=told):
            setattr(params, name, value)
        with pytest.raises(kind, match=told):
            SamplingParams(**{name: value})
    params.logits_processors = None
    assert (params.temperature, params.max_tokens) == (0.8, 8)


def test_copies_do_not_change_with_the_original():
    params = SamplingParams(max_tokens=4, truncate_prompt_tokens=7)
    copies = [params.clone(), copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))]
    assert [each.truncate_prompt_tokens for each in copies] == [7] * 4
    frozen = params.frozen()
    params.max_tokens = 9
    assert [each.max_tokens for each in (*copies, frozen)] == [4] * 5
    assert type(frozen) is triptych.SamplingParams
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_best_of_n_is_n():
    assert SamplingParams(n=3, best_of=3).n == 3


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
        ({"json_object": True, "backend": "xgrammar"}, "json_object", True),
        ({"regex": "a+", "disable_any_whitespace": False}, "any_whitespace", True),
        ({"regex": "a+"}, "any_whitespace", False),
    ],
)
def test_forms(given, field, expected):
    assert getattr(StructuredOutputsParams(**given), field) == expected
    assert GuidedDecodingParams.from_optional(**given) == StructuredOutputsParams(**given)
    params = SamplingParams(guided_decoding=GuidedDecodingParams(**given))
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(**given))


def test_forms_that_are_none_or_several_are_refused():
    assert GuidedDecodingParams.from_optional(json=None, backend="auto") is None
    with pytest.raises(ValueError, match="none: exactly one of json"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="regex, choice: exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="disable_additional_properties"):
        StructuredOutputsParams(json={}, disable_additional_properties=True)
    with pytest.raises(TypeError, match="'jsn'"):
        StructuredOutputsParams(jsn={})


def test_repetitions_have_the_same_form():
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    assert SamplingParams(repetition_detection=detection).repetition_detection == detection
