"""Tokens of simulated requests that may not have any word: forms, biases, bad words, allowed ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer, write_model_directory
from tests.helpers.in_process import InProcessEngine
from tests.worker.simulated import WORD_IDS, simulated_runner
from triptych.types.sampling import SamplingParams
from triptych.types.structured import compiled
from triptych_services.worker.sampling import form_output
from triptych_services.worker.sampling.form_output import LATE, FormOutput
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.simulation.vocabulary import read_closing_ids, read_word_ids

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_id(EOS)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model):
    vocabulary = model, TOKENIZER.vocab_size, (EOS_ID,)

    def make_engine(**options) -> InProcessEngine:
        runner = simulated_runner(
            vocab_size=TOKENIZER.vocab_size,
            eos=EOS_ID,
            word_ids=read_word_ids(*vocabulary),
            closing_ids=read_closing_ids(*vocabulary),
            compiler=GrammarCompiler(model, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS_ID,)),
            max_model_len=2048,
            num_blocks=9000,
            tokens_per_step=options.pop("tokens_per_step", 1),
        )
        return InProcessEngine(runner, **options)

    return make_engine


def form_of(schema, **fields) -> SamplingParams:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return SamplingParams(structured_outputs=compiled(grammar), max_tokens=1500, **fields)


def regex(pattern, **fields) -> SamplingParams:
    grammar = LLMatcher.grammar_from_regex(pattern)
    return SamplingParams(structured_outputs=compiled(grammar), max_tokens=1500, **fields)


def texts(engine, sampling, count=8) -> list[str]:
    outputs = engine.generate([[seed + 1] for seed in range(count)], sampling)
    assert all(output[-1] == EOS_ID for output in outputs)
    return [TOKENIZER.decode(output[:-1]) for output in outputs]


def test_outputs_conform_to_their_schema_and_end(make):
    found = texts(make(), form_of(SCHEMA))
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 4


@pytest.mark.parametrize(
    "options", [{}, {"steps_in_flight": 4}, {"num_blocks": 31, "max_model_len": 120}, {"tokens_per_step": 3}]
)
def test_batches_and_preemptions_change_nothing(make, options):
    sampling = form_of(SCHEMA, temperature=0.7)
    expected = [
        make(steps_in_flight=1).generate([[seed + 1]], replace(sampling, seed=seed))[0] for seed in range(6)
    ]
    engine = make(**options)
    assert engine.generate([[seed + 1] for seed in range(6)], sampling) == expected
    if "num_blocks" in options:
        assert engine.scheduler.counters.num_preemptions, "else the test says nothing"


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_rows_whose_masks_are_late_get_the_same_tokens(make, monkeypatch, steps_in_flight):
    sampling, prompts = regex("[a-f]{9}", seed=4), [[1], [2], [3]]
    expected = make(steps_in_flight=1).generate(prompts, sampling)
    monkeypatch.setattr(
        form_output, "SLOW_MASK_S", -1.0
    )  # all are slow, and one of them is computed in a step
    monkeypatch.setattr(form_output, "SLOW_MASKS_S", 0.0)
    late = []
    monkeypatch.setattr(FormOutput, "leave", lambda form: (late.append(form), form._fail(LATE)))
    assert make(steps_in_flight=steps_in_flight).generate(prompts, sampling) == expected
    assert late, "else the test says nothing"


def test_output_matches_its_regex(make):
    for text in texts(make(), regex("[a-f]{3}-[0-9]{2,4}( the)?")):
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}( the)?", text), text


def test_form_ends_only_after_min_tokens(make):
    sampling = regex("a+", min_tokens=5)
    assert all(re.fullmatch("a{5,}", text) for text in texts(make(), sampling))


def test_form_against_allowed_ids_fails_by_name(make):
    engine = make()
    sampling = regex("[a-c]+", allowed_token_ids=(TOKENIZER.encode("z")[0],))
    with pytest.raises(AssertionError, match="mask every token"):
        engine.generate([[1]], sampling)


def test_runner_without_a_compiler_refuses_forms():
    with pytest.raises(AssertionError, match="this worker was started without a tokenizer"):
        InProcessEngine(simulated_runner()).generate([[1]], regex("a"))


def test_grammar_that_does_not_compile_fails_its_request(make):
    with pytest.raises(AssertionError, match="structured_outputs: "):
        make().generate([[1]], SamplingParams(structured_outputs=compiled("{"), max_tokens=3))


def generate(sampling) -> list[int]:
    outputs = InProcessEngine(simulated_runner()).generate([[seed] for seed in range(8)], sampling)
    return [token for output in outputs for token in output]


def test_bias_pushes_and_bans():
    word, other = int(WORD_IDS[0]), 3
    assert set(generate(SamplingParams(max_tokens=20, logit_bias=((other, 100.0),)))) == {other}
    assert set(generate(SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((word, 0.5),)))) == {word}
    banned = tuple((int(token), -100.0) for token in WORD_IDS[:-1])
    assert set(generate(SamplingParams(max_tokens=20, logit_bias=banned))) == {int(WORD_IDS[-1])}


def test_bias_is_a_weight():
    bias = float(np.log(WORD_IDS.size - 1))  # as heavy as all other words together
    counts = Counter(generate(SamplingParams(max_tokens=100, logit_bias=((int(WORD_IDS[0]), bias),))))
    assert 300 < counts[int(WORD_IDS[0])] < 500, "of 800; the deviation is 14"


def test_bad_words_never_come():
    first, second, third = (int(word) for word in WORD_IDS[:3])
    sampling = SamplingParams(max_tokens=60, allowed_token_ids=(first, second, third))
    plain = generate(sampling)
    pairs = set(pairwise(plain))
    assert (first, second) in pairs, "else the test says nothing"
    for output in InProcessEngine(simulated_runner()).generate(
        [[seed] for seed in range(8)], replace(sampling, bad_words=((first, second), (third,)))
    ):
        assert third not in output
        assert (first, second) not in pairwise(output)
