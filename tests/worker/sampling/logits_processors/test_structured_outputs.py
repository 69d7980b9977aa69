"""Forms of outputs in the sampler and in the runner, over a tokenizer of bytes and a few words."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.helpers.byte_tokenizer import EOS, byte_backend, byte_tokenizer, write_model_directory
from tests.worker.deferred import DeferredStream
from tests.worker.sampling.fake_matchers import ExhaustedMatcher, HeldCompiler
from tests.worker.sampling.sampler_bench import SamplerBench
from tests.worker.step_runs import assert_same, runner_for
from tests.worker.tiny import new_row, step_plan, tiny_architecture, tiny_config
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowErrorCode
from triptych.types.structured import compiled
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.sampling import grammars as grammars_module
from triptych_services.worker.sampling.form_output import (
    MASKED_BY_OTHERS,
    NOT_READY,
    SLOW_MASK_S,
    FormOutput,
)
from triptych_services.worker.sampling.grammars import (
    MAX_COMPILED,
    TOKENIZER_FILE,
    GrammarCompiler,
    GrammarError,
)
from triptych_services.worker.sampling.logits_processors.structured_outputs import StructuredForms

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size + 5  # as models pad it
EOS_ID = TOKENIZER.token_id(EOS)
LETTER = TOKENIZER.encode("z")[0]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> GrammarCompiler:
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    return GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


@pytest.fixture
def bench(grammars) -> SamplerBench:
    return SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=grammars)


def regex(pattern: str, **fields) -> SamplingParams:
    return SamplingParams(structured_outputs=compiled(LLMatcher.grammar_from_regex(pattern)), **fields)


def json_of(schema: dict, **fields) -> SamplingParams:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return SamplingParams(structured_outputs=compiled(grammar), **fields)


def logits_at(step: int, num_rows: int = 1) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE] the same in every row; control tokens are unlikely, as in models."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))
    return logits.expand(num_rows, -1).contiguous()


def generate(bench, slot, params, *, seed=1, first=0, output=(), length=60) -> list[int]:
    """Return the output tokens of a request alone, with those that it enters with."""
    bench.enter(slot, params, output=output, seed=seed)
    tokens = list(output)
    for step in range(first, length):
        sampled = bench.sample(logits_at(step), [slot])
        assert sampled.failures == ()
        tokens.append(int(sampled.token_ids[0]))
        if tokens[-1] == EOS_ID or tokens[-1] in params.stop_token_ids:
            return tokens
        bench.extend(slot, tokens[-1])
    return tokens


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS_ID
    return TOKENIZER.decode(tokens[:-1])


def failure_of(bench, params, **arguments):
    """Return why the only row of a step fails."""
    bench.enter(0, params, **arguments)
    ((row, error),) = bench.sample(logits_at(0), [0]).failures
    assert row == 0
    return error


@pytest.mark.parametrize(
    "pattern", ["[a-f]{3}-[0-9]{1,4}", "(yes|no|Hello world)", "(ä|ö){2,3}x?", "the( stop)*!"]
)
def test_output_matches_its_regex(bench, pattern):
    outputs = {text_of(generate(bench, 0, regex(pattern), seed=seed)) for seed in range(12)}
    assert len(outputs) > 1
    for text in outputs:
        assert re.fullmatch(pattern, text), text


def test_output_conforms_to_its_schema(bench):
    for seed in range(12):
        value = json.loads(text_of(generate(bench, 0, json_of(PERSON), seed=seed)))
        jsonschema.validate(value, PERSON)


def test_greedy_output_is_the_best_token_of_the_form(bench):
    logits = logits_at(0)
    digits = [TOKENIZER.encode(digit)[0] for digit in "0123456789"]
    bench.enter(0, regex("[0-9]+", temperature=0.0))
    best = digits[int(logits[0, digits].argmax())]
    assert bench.sample(logits, [0]).token_ids.tolist() == [best]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_k": 7},
        {"min_tokens": 9},
        {"presence_penalty": 1.0},
    ],
    ids=str,
)
def test_what_is_settled_is_the_choice_among_masked_logits(bench, monkeypatch, fields):
    kept, forced = [], []

    def settle(self, slots, token_ids):
        settled = judge(self, slots, token_ids)
        for token_id, first in zip(settled.tolist(), token_ids.tolist(), strict=True):
            if token_id >= 0:
                (kept if token_id == first else forced).append(token_id)
        return settled

    judge = StructuredForms.settle
    monkeypatch.setattr(StructuredForms, "settle", settle)
    params = json_of(PERSON, **fields) if fields.get("temperature", 1) else regex("[a-z ]{30}", **fields)
    found = [generate(bench, 0, params, seed=seed, length=25) for seed in range(8)]
    monkeypatch.setattr(StructuredForms, "settle", lambda self, slots, token_ids: np.full(slots.size, -1))
    monkeypatch.setattr(FormOutput, "find_forced", lambda self: None)  # so each token has llguidance's mask
    assert found == [generate(bench, 0, params, seed=seed, length=25) for seed in range(8)]
    assert bool(kept) == fields.keys().isdisjoint({"top_k", "presence_penalty"}), "else the test says nothing"
    assert bool(forced) == ("presence_penalty" not in fields and params.temperature > 0)


def test_forms_do_not_touch_each_other_nor_rows_without(bench):
    params = [json_of(PERSON), SamplingParams(), regex("[a-f]{30}"), SamplingParams(top_k=9, logprobs=2)]
    alone = [generate(bench, 0, each, seed=7 + slot, length=12) for slot, each in enumerate(params)]
    for slot, each in enumerate(params):
        bench.enter(slot, each, seed=7 + slot)
    together: list[list[int]] = [[] for _ in params]
    for step in range(12):
        sampled = bench.sample(logits_at(step, len(params)), range(len(params)))
        for slot, token_id in enumerate(sampled.token_ids.tolist()):
            together[slot].append(token_id)
            bench.extend(slot, token_id)
    for slot, tokens in enumerate(alone):
        assert together[slot][: len(tokens)] == tokens, slot


def test_masks_of_threads_are_those_of_one(bench, grammars):
    params = regex("[a-f]{30}", top_k=7)  # its mask is always computed
    alone = [generate(bench, slot, params, seed=slot, length=6) for slot in range(3)]
    for slot in range(3):
        bench.enter(slot, params, seed=slot)
    compilation = grammars.start(params.structured_outputs.grammar)
    for step in range(6):
        compilation.mask_s = 0.9 * SLOW_MASK_S  # of one: all together are slow
        token_ids = bench.sample(logits_at(step, 3), range(3)).token_ids.tolist()
        assert token_ids == [tokens[step] for tokens in alone]
        for slot, token_id in enumerate(token_ids):
            bench.extend(slot, token_id)
    assert bench.forms._executor is not None, "else the test says nothing"


@pytest.mark.parametrize("num_output", [1, 5, 11])
def test_resumed_request_goes_on_as_undisturbed(bench, num_output):
    params = json_of(PERSON, temperature=1.4)
    whole = generate(bench, 2, params, seed=5)
    assert len(whole) > 12
    resumed = generate(bench, 6, params, seed=5, first=num_output, output=whole[:num_output])
    assert resumed == whole


def test_choices_of_a_request_have_states_of_their_own(bench):
    params = regex("[a-z]{2}=[0-9]{2}")
    alone = [generate(bench, 0, params, seed=seed) for seed in range(3)]
    for slot in range(3):
        bench.enter(slot, params, seed=slot)
    for step in range(6):
        token_ids = bench.sample(logits_at(step, 3), range(3)).token_ids.tolist()
        assert token_ids == [tokens[step] for tokens in alone]
        for slot, token_id in enumerate(token_ids):
            bench.extend(slot, token_id)


def test_whole_form_is_followed_by_an_end_token_only(bench):
    letters = TOKENIZER.encode("ab")
    bench.enter(0, regex("ab", stop_token_ids=(LETTER,)), output=letters)
    logits = logits_at(0)
    logits[0, [EOS_ID, LETTER]] = -50.0
    ends = {int(bench.sample(logits, [0]).token_ids[0])}
    logits[0, EOS_ID] = -100.0
    ends.add(int(bench.sample(logits, [0]).token_ids[0]))
    assert ends == {EOS_ID, LETTER}


def test_end_token_comes_only_where_the_form_may_end(bench):
    params = regex("a(bb)*", temperature=0.0, stop_token_ids=(LETTER,))
    logits = logits_at(0)
    logits[0, [EOS_ID, LETTER]] = 100.0
    first, second = TOKENIZER.encode("ab")
    bench.enter(0, params)
    assert bench.sample(logits, [0]).token_ids.tolist() == [first]
    bench.extend(0, first)
    assert bench.sample(logits, [0]).token_ids[0] in (EOS_ID, LETTER)
    bench.extend(0, second)
    assert bench.sample(logits, [0]).token_ids.tolist() == [second]


def test_min_tokens_masks_the_end_where_the_form_goes_on(bench):
    params = regex("a*", temperature=0.0, min_tokens=3)
    logits = logits_at(0)
    logits[0, EOS_ID] = 100.0
    (letter,) = TOKENIZER.encode("a")
    bench.enter(0, params)
    for expected in (letter, letter, letter, EOS_ID):
        assert bench.sample(logits, [0]).token_ids.tolist() == [expected]
        bench.extend(0, expected)


@pytest.mark.parametrize(
    ("params", "output"),
    [
        (regex("a", min_tokens=9), "a"),
        (regex("a", min_tokens=9, presence_penalty=1.0, repetition_penalty=1.1), "a"),
        (regex("[ab]", allowed_token_ids=(LETTER,)), ""),
        (regex("a", min_tokens=9, bad_words=((LETTER,),)), "a"),
    ],
)
def test_form_against_other_masks_fails_by_name(bench, params, output):
    assert failure_of(bench, params, output=TOKENIZER.encode(output)) == MASKED_BY_OTHERS


def test_forced_token_without_a_usable_logit_fails_by_name(bench):
    first, second, third = TOKENIZER.encode("xyz")
    logits = logits_at(0)
    logits[0, second] = -torch.inf
    bench.enter(0, regex("xyz"))
    assert bench.sample(logits, [0]).token_ids.tolist() == [first]
    bench.extend(0, first)
    assert bench.sample(logits, [0]).failures == ((0, MASKED_BY_OTHERS),)
    bench.extend(0, second)
    assert bench.sample(logits, [0]).token_ids.tolist() == [third]


def test_output_so_far_of_another_form_fails(bench):
    error = failure_of(bench, regex("[0-9]+"), output=TOKENIZER.encode("12x"))
    assert error.code is RowErrorCode.INVALID_REQUEST
    assert "does not have this form" in error.message


def test_failure_leaves_the_other_rows_as_they_are(bench):
    alone = generate(bench, 3, regex("[a-f]+"), seed=9, length=1)
    bench.enter(1, regex("[0-9]+"), output=TOKENIZER.encode("x"))
    bench.enter(3, regex("[a-f]+"), seed=9)
    sampled = bench.sample(logits_at(0, 2), [1, 3])
    assert [row for row, _ in sampled.failures] == [0]
    assert sampled.token_ids[1] == alone[0]


def test_step_behind_the_end_does_no_harm(bench):
    for end in (EOS_ID, LETTER):
        output = [*TOKENIZER.encode("ab"), end, LETTER]
        bench.enter(0, regex("ab", stop_token_ids=(LETTER,)), output=output)
        assert bench.sample(logits_at(0), [0]).failures == ()


AMBIGUOUS = LLMatcher.grammar_from_lark(
    "start: s\ns: T | | " + " | ".join("s " * n for n in range(2, 25)) + "\nT: /[^\\x00]/"
)


def test_mask_that_takes_too_many_items_fails_its_row_alone(bench):
    alone = generate(bench, 3, regex("[a-f]+"), seed=9, length=1)
    output = TOKENIZER.encode("abab")
    params = SamplingParams(structured_outputs=compiled(AMBIGUOUS), top_k=7)  # its mask is always computed
    bench.enter(1, params, output=output)
    bench.enter(3, regex("[a-f]+"), seed=9)
    sampled = bench.sample(logits_at(0, 2), [1, 3])
    ((row, error),) = sampled.failures
    assert row == 0
    assert "Too many items (limit 12000" in error.message
    assert sampled.token_ids[1] == alone[0]


def test_token_refused_for_a_limit_tells_the_limit(bench):
    properties = {f"p{i}": {} for i in range(600)}
    params = json_of({"type": "object", "properties": properties, "additionalProperties": False})
    error = failure_of(bench, params, output=TOKENIZER.encode('{"'))
    assert error.code is RowErrorCode.INVALID_REQUEST
    assert "max is 2000" in error.message


def test_parser_at_its_limit_fails_and_does_not_end_the_output():
    bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=HeldCompiler(ExhaustedMatcher()))
    error = failure_of(bench, regex("a+"))
    assert error.message == "structured_outputs: too many items"


# Rows that are not ready


def held_bench() -> tuple[SamplerBench, HeldCompiler]:
    compiler = HeldCompiler()
    bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=compiler)
    bench.forms.may_defer = True
    return bench, compiler


def test_row_without_its_grammar_leaves_the_step(bench, grammars):
    alone = generate(bench, 3, SamplingParams(), seed=9, length=1)
    expected = generate(bench, 0, regex("[a-f]{9}"), seed=4)
    held, compiler = held_bench()
    held.enter(1, regex("[a-f]{9}"), seed=4)
    held.enter(3, SamplingParams(), seed=9)
    for _ in range(2):  # and the steps that were on their way
        sampled = held.sample(logits_at(0, 2), [1, 3])
        assert sampled.failures == ((0, NOT_READY),)
        assert sampled.token_ids[1] == alone[0]
        compiler.finish(grammars)
    assert generate(held, 1, regex("[a-f]{9}"), seed=4) == expected, "as it enters again"


def test_step_waits_where_the_engine_takes_nothing_back(grammars):
    held, compiler = held_bench()
    held.forms.may_defer = False
    held.enter(1, regex("[a-f]"))
    timer = threading.Timer(0.2, compiler.finish, (grammars,))
    timer.start()
    assert held.sample(logits_at(0), [1]).failures == ()
    timer.join()


def test_grammar_that_is_never_compiled_fails_its_request():
    held, compiler = held_bench()
    params = regex("[a-f]")
    held.enter(1, params)
    compiler.compilations[params.structured_outputs.grammar].started_at -= 31
    ((_, error),) = held.sample(logits_at(0), [1]).failures
    assert "is not compiled after 30 s" in error.message
    assert not error.is_deferral


class OtherRank:
    """A group of two ranks, of which the other has or lacks its matchers."""

    tensor_parallel_size = 2

    def __init__(self, *, other_misses: bool) -> None:
        self.other_misses = other_misses

    def all_reduce(self, tensor):
        return tensor + float(self.other_misses)


@pytest.mark.parametrize("own_misses", [False, True])
@pytest.mark.parametrize("other_misses", [False, True])
def test_ranks_leave_out_the_same_rows(grammars, own_misses, other_misses):
    held, compiler = held_bench()
    held.forms._group = OtherRank(other_misses=other_misses)
    held.enter(1, regex("[a-f]"))
    if not own_misses:
        compiler.finish(grammars)
    failures = held.sample(logits_at(0), [1]).failures
    assert failures == (((0, NOT_READY),) if own_misses or other_misses else ())


def test_short_grammars_do_not_wait_for_long_ones(tmp_path):
    directory = write_model_directory(tmp_path)
    grammars = GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    release = threading.Event()
    compile_one = grammars._prepare()

    def hold_long(text):
        if len(text) > grammars_module._SHORT_CHARS:
            assert release.wait(30)
        return compile_one(text)

    grammars._compile = hold_long
    long = grammars.start(LLMatcher.grammar_from_regex("a" * grammars_module._SHORT_CHARS))
    assert not grammars.start(LLMatcher.grammar_from_regex("a")).result(30).is_error()
    assert not long.done()
    release.set()
    assert not long.result(30).is_error()


def test_waiting_grammars_are_not_forgotten_for_others():
    directory = Path("unused")
    grammars = GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    release = threading.Event()
    grammars._compile = lambda text: release.wait(30)
    first = grammars.start("0")
    for number in range(1, 2 * MAX_COMPILED):
        grammars.start(str(number))
    assert grammars.start("0") is first
    release.set()
    assert first.result(30)


def test_masks_are_those_of_a_tokenizer_without_slices(grammars):
    texts = {"a": {"type": "string", "maxLength": 24}, "b": {"type": "string"}, "c": {"type": "number"}}
    schema = {"type": "object", "properties": texts, "required": list(texts), "additionalProperties": False}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    plain = LLTokenizer(byte_backend().to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS_ID], slices=[])
    rng, num_wide = np.random.default_rng(3), 0
    for _ in range(4):
        ours, other = grammars.start(grammar).result(30).deep_copy(), LLMatcher(plain, grammar)
        for _ in range(60):
            mask = ours.compute_bitmask()
            assert mask == other.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            num_wide += bits.sum() > 50
            token_id = int(rng.choice(bits.nonzero()[0]))
            if token_id == EOS_ID:
                break
            assert ours.consume_token(token_id)
            assert other.consume_token(token_id)
    assert num_wide > 50, "else the test says nothing"


FORCED = ('{"first name": "', "don't  wait 12345", " 日本語.")


@pytest.fixture(scope="module")
def word_grammars(tmp_path_factory) -> GrammarCompiler:
    """Return a compiler with a tokenizer that has words, and a token that ends within a character."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((within, _),) = bytes_only.pre_tokenize_str("本語")
    vocab = {
        character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)
    }
    merges = []
    for word in ("first", "Ġname", "don", "Ġwait", "123", '":', within[1:4], within[4:]):
        for end in range(2, len(word) + 1):
            vocab[word[:end]] = len(vocab) + 1
            merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab={EOS: 0, **vocab}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    directory = tmp_path_factory.mktemp("words")
    backend.save(str(directory / TOKENIZER_FILE))
    return GrammarCompiler(directory, vocab_size=backend.get_vocab_size(), eos_token_ids=(0,))


@pytest.mark.parametrize("text", FORCED)
def test_tokens_known_ahead_are_those_of_masks(word_grammars, text):
    compilation = word_grammars.start(LLMatcher.grammar_from_regex(f"([ab]{re.escape(text)}){{9}}"))
    rng, num_known, num_others = np.random.default_rng(5), 0, 0
    for _ in range(3):
        output = FormOutput(compilation, (0,), can_keep_first=True)
        output.start(is_missing=False, may_defer=False)
        matcher = compilation.result(30).deep_copy()
        while not matcher.is_stopped():
            expected = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            num_known += output.forced is not None
            found = np.zeros_like(expected)
            output.fill(found)
            output.finish_mask(found)
            assert found.tolist() == expected.tolist()
            token_ids = np.unpackbits(expected.view(np.uint8), bitorder="little").nonzero()[0].tolist()
            others = [each for each in range(1, 257) if output.may_come(each) and each not in token_ids]
            if others and rng.random() < 0.2:  # the model spells the text in another way
                token_ids, num_others = others, num_others + 1
            token_id = int(rng.choice(token_ids))
            assert matcher.consume_token(token_id)
            output.take((token_id,))
        assert output.error is None
    assert num_others > 3, "else the test says nothing"
    assert num_known > 9 or not text.isascii()


@pytest.mark.parametrize("text", ["{", "{}", LLMatcher.grammar_from_regex("(")])
def test_bad_grammar_fails_by_name(bench, text):
    error = failure_of(bench, SamplingParams(structured_outputs=compiled(text)))
    assert error.message.startswith("structured_outputs: ")
    assert error.kv_is_valid


def test_worker_without_tokenizer_refuses_forms(tmp_path):
    for grammars in (None, GrammarCompiler(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))):
        bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=grammars)
        assert "tokenizer" in failure_of(bench, regex("a")).message
        assert generate(bench, 0, SamplingParams(), length=2)


def test_grammar_is_compiled_once_and_forgotten_after_others(tmp_path):
    directory = write_model_directory(tmp_path)
    grammars = GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    texts = [LLMatcher.grammar_from_regex(f"a{{{number}}}") for number in range(MAX_COMPILED + 1)]
    first = grammars.start(texts[0])
    assert grammars.start(texts[0]) is first
    for text in texts[1:]:
        assert not grammars.start(text).result(30).is_error()
    assert grammars.start(texts[0]) is not first
    with pytest.raises(GrammarError):
        grammars.start("{").result(30)


def test_chain_of_rules_as_long_as_a_form_compiles(grammars):
    """It overflows the stack of a usual thread."""
    chain = "".join(f"r{number}:r{number + 1}\n" for number in range(9000))
    text = LLMatcher.grammar_from_lark(f'start:r0\n{chain}r9000:"a"\n')
    assert not grammars.start(text).result(30).is_error()


def test_overlapped_steps_say_the_same(grammars):
    config = tiny_config(tiny_architecture(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,)))
    checkpoint = RandomCheckpoint(config.architecture, seed=3)
    rows = [
        new_row(slot, [5 + slot, 6, 7], range(1 + 9 * slot, 8 + 9 * slot), sampling=sampling, seed=slot)
        for slot, sampling in enumerate([json_of(PERSON), SamplingParams(), regex("[a-f]{40}")])
    ]
    plans = [step_plan(1, new=rows, chunks={0: 3, 1: 3, 2: 3}), *map(step_plan, range(2, 14))]
    one, other = (
        runner_for(load_model(config, checkpoint), config, stream, grammars=grammars)
        for stream in (None, DeferredStream())
    )
    expected = [one.execute(plan) for plan in plans]
    pending = []
    for plan, result in zip(plans, expected, strict=True):
        pending.append(other.launch(plan))
        if len(pending) > 2:
            assert_same(pending.pop(0).wait(), expected[plan.step_id - 3])
        assert result.row_errors == {}
    letters = TOKENIZER.decode([int(result.token_ids[2]) for result in expected])
    assert re.fullmatch("[a-f]+", letters)
