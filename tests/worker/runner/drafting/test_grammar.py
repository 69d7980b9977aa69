"""Guesses from forms: every one may come, the forced ones are found, and asking for them changes no output."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer, write_model_directory
from tests.worker.runner.drafting.guessing import blocks_of, runner_with, say
from tests.worker.runner.drafting.test_speculation import assert_same, config_of, needs_kernels
from tests.worker.tiny import new_row
from triptych.config import SpeculativeConfig
from triptych.types.sampling import SamplingParams
from triptych.types.structured import compiled
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.drafting.create import ngram_only, proposers_of
from triptych_services.worker.runner.drafting.grammar import GrammarProposer
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.params import TokenHistory

WORDS = ('":', '",', '":"', '","', '{"', '"}', "name", "age", "Ann")
STRICT = {"additionalProperties": False}


def tokenizer_with_marks() -> Tokenizer:
    """Return a tokenizer of bytes and a few words and marks; id 0 ends an output."""
    vocab = {"Ā": 0} | {
        character: index
        for index, character in enumerate(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ā"}), 1)
    }
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


BACKEND = tokenizer_with_marks()
VOCAB = BACKEND.get_vocab_size()
TOKENIZER = LLTokenizer(BACKEND.to_str(), n_vocab=VOCAB, eos_token=[0])


def grammar_of(schema: dict[str, Any], *, any_whitespace: bool = False) -> str:
    overrides: Any = {"whitespace_flexible": any_whitespace, "lenient": False}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


class OneForm:
    """A `FormMatchers` of one row in slot 0, and the history of its output."""

    def __init__(self, grammar: str, **sampling: Any) -> None:
        self.tokenizer = TOKENIZER
        self.matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
        assert not self.matcher.is_error()
        self.history = TokenHistory(
            np.zeros((1, 512), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)
        )
        self.now = 0.0
        self.cost_s = 0.0
        """The time that looking ahead takes."""
        self.num_asked = 0
        self.proposer = GrammarProposer([0], history=self.history, forms=self, clock=lambda: self.now)
        params = SamplingParams(structured_outputs=compiled(grammar), **{"temperature": 0.0, **sampling})
        self.proposer.enter(new_row(0, [], [], sampling=params, num_prompt=0))

    def look_ahead(self, slot: int) -> LLMatcher:
        assert slot == 0
        self.num_asked += 1
        self.now += self.cost_s
        return self.matcher.deep_copy()

    def say(self, *token_ids: int) -> None:
        for token_id in token_ids:
            assert self.matcher.consume_token(token_id), BACKEND.decode([token_id])
            self.history.token_ids[0, self.history.num_known[0]] = token_id
            self.history.num_known[0] += 1

    def say_texts(self, *texts: str) -> None:
        """Say tokens, one for each text."""
        self.say(*(BACKEND.token_to_id(text) for text in texts))

    def guess(self, limit: int = 8) -> list[int]:
        guesses = self.proposer.propose(np.array([0]), np.array([limit]))
        assert guesses.counts.tolist() == [guesses.token_ids.size]
        assert guesses.token_ids.size <= limit
        return guesses.token_ids.tolist()

    def guess_texts(self, limit: int = 8) -> list[str]:
        return [BACKEND.id_to_token(token_id) for token_id in self.guess(limit)]


PERSON = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in (("name", "string"), ("age", "integer"), ("ok", "boolean"))},
    "required": ["name", "age", "ok"],
    **STRICT,
}  # fmt: skip


def test_names_are_guessed_and_marks_as_the_row_spells_them() -> None:
    form = OneForm(grammar_of(PERSON))
    assert form.guess_texts() == ['{"', "name", '":"']
    form.say_texts("{", '"', "name", '":', '"', "Ann", '",')
    assert form.guess_texts() == ['"', "age", '":']  # and not '":"' in the places of two tokens
    form.say_texts('"', "age", '":', "4", ",")
    assert form.guess_texts() == ['"', "o", "k", '":']
    assert form.guess_texts(limit=2) == ['"', "o"]
    form.say_texts('"', "o", "k", '":', "t")
    assert form.guess_texts() == ["r", "u", "e", "}", BACKEND.id_to_token(0)]  # and then the end


def test_nothing_is_guessed_within_texts_and_for_rows_without_a_form() -> None:
    form = OneForm(grammar_of(PERSON))
    form.say_texts("{", '"', "name", '":', '"', "Ann")
    assert form.guess() == []
    form.say_texts(",")
    assert form.guess() == []
    form.proposer.leave(0)
    form.say_texts('",')
    assert form.guess() == []


def test_names_that_may_be_left_out_are_guessed_in_their_order() -> None:
    form = OneForm(grammar_of({**PERSON, "required": ["ok"]}))
    assert form.guess_texts(3)[:2] == ['{"', "name"]
    form.say_texts('{"', "age", '":', "4", ",")
    assert form.guess_texts() == ['"', "o", "k", '":']


def test_white_space_is_guessed_where_the_row_has_written_it_before() -> None:
    form = OneForm(grammar_of(PERSON, any_whitespace=True))
    form.say_texts("{", "Ċ", '"', "name", '":', "Ġ", '"', "Ann", '",')
    assert form.guess_texts() == []  # a comma is new
    form.say_texts("Ċ", '"', "age", '":', "Ġ", "4", ",")
    assert form.guess_texts(6) == ["Ċ", '"', "o", "k", '":', "Ġ"]


def test_looking_ahead_takes_a_share_of_the_time_and_stops_for_slow_rows() -> None:
    form = OneForm(grammar_of(PERSON))
    form.cost_s = 0.004
    for _ in range(20):
        form.guess()
    assert form.num_asked == 6  # 20 ms at once, and a tenth of the time since then
    form.now += 0.1
    assert form.guess()
    slow = OneForm(grammar_of(PERSON))
    slow.cost_s = 0.006
    assert [bool(slow.guess()) for _ in range(4)] == [True, True, False, False]
    slow.now += 100.0
    assert slow.guess() == []
    assert slow.num_asked == 2


def test_long_grammars_are_not_looked_ahead_of() -> None:
    assert OneForm(grammar_of({"enum": ["x" * 9000]})).guess() == []


NAMES = st.sampled_from(["name", "age", "a b", "x", 'q"', "ä", "is_ok"])
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 8},
            {"type": "integer"},
            {"type": "boolean"},
            {"enum": ["name", "names", "red"]},
            {"const": {"a": [1, "Ann"]}},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                **STRICT,
            },
            st.dictionaries(NAMES, inner, max_size=4),
            st.sets(NAMES),
        ),
    ),
    max_leaves=6,
)


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist()


def valid(matcher: LLMatcher) -> list[int]:
    return [token_id for token_id in range(VOCAB) if matcher.validate_tokens([token_id])] or [0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("num_schemas", [15, 300])
def test_every_guess_may_come_and_every_forced_byte_is_guessed(num_schemas: int) -> None:
    @settings(max_examples=num_schemas, deadline=None)
    @given(SCHEMAS, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
    def check(schema: dict[str, Any], any_whitespace: bool, is_greedy: bool, random: Random) -> None:
        """A greedy row may say what is valid, a sampled one what the mask has."""
        grammar = grammar_of(schema, any_whitespace=any_whitespace)
        form = OneForm(grammar, **({} if is_greedy else {"temperature": 1.0, "top_k": 5}))
        alone = LLMatcher(TOKENIZER, grammar, log_level=0)
        choices = valid if is_greedy else allowed
        for _ in range(60):
            guesses = form.guess(random.randint(1, 8))
            assert allowed(form.matcher) == allowed(alone)
            forced = alone.deep_copy().compute_ff_bytes()
            text = TOKENIZER.decode_bytes([token_id for token_id in guesses if token_id])
            assert text.startswith(forced[: len(text)])
            assert guesses or not forced
            ahead = alone.deep_copy()
            for token_id in guesses:
                assert token_id in choices(ahead)
                ahead.consume_token(token_id)
            token_id = random.choice(guesses[:1] if guesses and random.random() < 0.4 else choices(alone))
            if token_id == 0:
                return
            form.say(token_id)
            alone.consume_token(token_id)

    check()


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("float32", "none"),
        pytest.param("bfloat16", "none", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "q4", marks=pytest.mark.thorough),
    ],
)
def test_answers_in_a_form_are_the_same_in_fewer_steps(dtype: str, quantization: str, tmp_path: Path) -> None:
    vocab_size, num_new = byte_tokenizer().vocab_size + 5, 30
    config = config_of(dtype, quantization, vocab_size=vocab_size)
    eos_id = byte_tokenizer().token_id(EOS)
    grammars = GrammarCompiler(
        write_model_directory(tmp_path), vocab_size=vocab_size, eos_token_ids=(eos_id,)
    )
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    properties = {"the world": {"enum": ["yes", "no", "nobody"]}, "stop": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["stop"], **STRICT}
    form = {"structured_outputs": compiled(grammar_of(schema))}
    loose = {"structured_outputs": compiled(grammar_of(schema, any_whitespace=True))}
    kinds = [
        SamplingParams(temperature=0.0, **form),
        SamplingParams(temperature=0.0, logprobs=3, **form),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.9, **form),
        SamplingParams(temperature=0.8, logprobs=1, frequency_penalty=1.5, **form),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, **loose),
        SamplingParams(temperature=1.0, **loose),
        SamplingParams(temperature=0.0),
    ]
    rows = [
        new_row(slot, [7 + slot, 5, 9], blocks_of(slot), sampling=sampling, seed=100 + slot)
        for slot, sampling in enumerate(kinds)
    ]
    expected = say(runner_with(model, config, 1, grammars=grammars), rows, num_new, 1)
    assert not any(each.error for each in expected)
    by_rows_alone = say(runner_with(model, config, 6, ngram_only, grammars=grammars), rows, num_new, 6)
    proposers = proposers_of(SpeculativeConfig(enabled="true"))
    found = say(runner_with(model, config, 6, proposers, grammars=grammars), rows, num_new, 6)
    assert_same(by_rows_alone, expected)
    assert_same(found, expected)
    num_steps, num_steps_alone = (sum(each.num_steps for each in said[:4]) for said in (found, by_rows_alone))
    assert num_steps < 0.8 * num_steps_alone
