"""Guesses change no token and no log-probability, whatever they are and whatever the rows ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer, write_model_directory
from tests.helpers.in_process import InProcessEngine
from tests.worker.runner.drafting.guessing import (
    Replaying,
    Said,
    blocks_of,
    changes,
    make_up_times,
    replaying,
    runner_with,
    say,
)
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import (
    EchoModel,
    new_row,
    next_token,
    step_plan,
    tiny_architecture,
    tiny_config,
    tiny_facts,
)
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.facts import WorkerFacts
from triptych.types.output_limits import ThinkingBudget
from triptych.types.outputs import StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych.types.structured import compiled
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.drafting import speculation as drafting
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.request_rows import StepRows, create_rows
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.params import TokenHistory

VOCAB, NUM_NEW = 97, 13
CHANGES = tuple(changes(Random(0), VOCAB))
needs_kernels = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")


def rows_of(kinds: dict[str, SamplingParams]) -> list[NewRow]:
    random = Random(7)
    return [
        new_row(
            slot,
            [random.randrange(3, VOCAB) for _ in range(5 + slot)],
            blocks_of(slot),
            sampling=sampling,
            seed=100 + slot,
        )
        for slot, sampling in enumerate(kinds.values())
    ]


def known_of(said: list[Said]) -> dict[int, list[int]]:
    return {100 + slot: each.token_ids for slot, each in enumerate(said)}


def assert_same(found: list[Said], expected: list[Said]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert replace(one, num_steps=0) == replace(other, num_steps=0)


def config_of(dtype: str, quantization: str, cache: str = "auto", vocab_size: int = VOCAB) -> ResolvedConfig:
    architecture = tiny_architecture(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    engine = EngineConfig(
        model=ModelConfig(dtype=dtype, quantization=quantization, batch_invariant="true"),
        cache=CacheConfig(block_size=4, num_blocks=90, dtype=cache),
        scheduler=SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu"),
    )
    return resolve_config(engine, architecture)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "quantization", "cache"),
    [
        ("float32", "none", "auto"),
        pytest.param("float32", "none", "int8", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "none", "auto", marks=pytest.mark.thorough),
        ("bfloat16", "q4", "auto"),
        pytest.param("bfloat16", "q4", "int8", marks=pytest.mark.thorough),
        pytest.param("float32", "q8", "auto", marks=pytest.mark.thorough),
    ],
)
def test_recorded_programs_say_the_same(dtype: str, quantization: str, cache: str) -> None:
    config = config_of(dtype, quantization, cache)
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    rows = rows_of(KINDS)
    alone = runner_with(model, config, 1)
    expected = say(alone, rows, NUM_NEW, 1)
    assert alone.recorded() is not None
    assert not any(each.error for each in expected)
    for name, change in changes(Random(1), VOCAB).items():
        runner = runner_with(model, config, 5, replaying(known_of(expected), change))
        found = say(runner, rows, NUM_NEW, 5)
        assert_same(found, expected)
        if name == "right":  # 13 tokens in steps of 5, 5 and 3
            assert [each.num_steps for each in found] == [3] * len(rows)
        if name == "wrong":
            assert [each.num_steps for each in found] == [NUM_NEW] * len(rows)
    assert_same(say(runner_with(model, config, 5), rows, NUM_NEW, 5), expected)  # the n-gram proposer


@needs_kernels
def test_an_engine_and_a_runner_take_fewer_steps() -> None:
    """The costs of steps hardly grow with their positions here."""
    config = config_of("float32", "none")
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    greedy = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 8, 7]]
    answers, nums_steps, counters, timings = [], [], [], []
    for limit in (1, 5):
        kv = plan_kv_cache(config, free_bytes=1 << 30)
        facts = tiny_facts(config, kv.max_model_len, kv.shape, max_samples_per_row=limit)
        caches = allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places)
        runner = ModelRunner(model=model, kv_caches=caches, facts=facts)
        if runner._speculation is not None:
            make_up_times(runner._speculation)
        engine = InProcessEngine(runner, max_num_seqs=7)
        answers.append(engine.generate(prompts, greedy))
        nums_steps.append(runner._last_step_id)
        counters.append(engine.scheduler.counters)
        timings.append(StageTimings.of_all(list(engine.timings.values())))
    assert answers[0] == answers[1]
    assert nums_steps[1] < 0.8 * nums_steps[0]
    assert counters[0].num_guesses == 0
    assert nums_steps[0] - nums_steps[1] <= counters[1].num_accepted_guesses <= counters[1].num_guesses
    assert timings[1].num_accepted_guesses == counters[1].num_accepted_guesses
    assert timings[1].num_rejected_guesses == counters[1].num_guesses - counters[1].num_accepted_guesses


def looking_back(grammars: GrammarCompiler | None) -> dict[str, SamplingParams]:
    """Return requests with processors that read the tokens before."""
    kinds = {
        "bad words": SamplingParams(temperature=0.0, bad_words=((5,), (7, 8), (30,)), logprobs=1),  # type: ignore[arg-type]
        "penalties": SamplingParams(temperature=0.7, frequency_penalty=1.5, presence_penalty=0.4),
        "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.3),
        "end": SamplingParams(temperature=0.0, min_tokens=6, logit_bias=((2, 60.0),), stop_token_ids=(9,)),
        "thinking": SamplingParams(
            temperature=0.8,
            thinking_token_budget=ThinkingBudget(4, opening_id=20, closing_id=21, is_open=True),
        ),
    }
    if grammars is not None:
        pattern = compiled(LLMatcher.grammar_from_regex("(ab|cd|[e-h])+"))
        kinds["form"] = SamplingParams(temperature=0.0, structured_outputs=pattern, logprobs=2)
        kinds["sampled form"] = SamplingParams(temperature=1.0, top_k=9, structured_outputs=pattern)
    return kinds


@needs_kernels
def test_processors_take_in_accepted_tokens_only(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    vocab_size = tokenizer.vocab_size + 5
    config = config_of("float32", "none", vocab_size=vocab_size)
    eos_id = tokenizer.token_id(EOS)
    grammars = GrammarCompiler(
        write_model_directory(tmp_path), vocab_size=vocab_size, eos_token_ids=(eos_id,)
    )
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    rows = rows_of(looking_back(grammars))
    expected = say(runner_with(model, config, 1, grammars=grammars), rows, NUM_NEW, 1)
    assert not any(each.error for each in expected)
    for name, change in changes(Random(2), vocab_size).items():
        proposers = replaying(known_of(expected), change)
        found = say(runner_with(model, config, 6, proposers, grammars=grammars), rows, NUM_NEW, 6)
        assert_same(found, expected)
        if name == "right":
            assert [each.num_steps for each in found] == [3] * len(rows)  # of 6, 6 and 1 tokens


def test_a_request_may_be_kept_out_of_guessing() -> None:
    """Nothing is guessed for it, and proposers never see it."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    prompts = [5, 6, 7], [9, 8, 7]
    known = {100 + slot: continuation(prompt, 6) for slot, prompt in enumerate(prompts)}
    rows = [
        new_row(
            slot,
            prompt,
            blocks_of(slot),
            sampling=SamplingParams(temperature=0.0, speculation=slot == 0),
            seed=100 + slot,
        )
        for slot, prompt in enumerate(prompts)
    ]
    made: list[Replaying] = []

    def create(facts: WorkerFacts, history: TokenHistory, forms: object) -> list[Replaying]:
        made.append(Replaying(history, known, lambda ids: ids))
        return made

    found = say(runner_with(EchoModel(VOCAB), config, 6, create), rows, 6, 6)
    assert [each.token_ids for each in found] == [known[100], known[101]]
    assert [each.num_steps for each in found] == [1, 6]
    assert made[0].num_accepted == {100: 6}


def test_row_without_finite_logits_gets_the_tokens_before_and_fails_in_its_next_step() -> None:
    """The last guess is right, and nothing can follow it."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    known = continuation([5, 6, 7], 6)
    model = EchoModel(VOCAB, poisoned_tokens=[known[3]])
    assert known[3] not in known[:3]
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=1)):
        rows = [new_row(0, [5, 6, 7], blocks_of(0), sampling=params, seed=100)]
        alone = say(runner_with(model, config, 1), rows, 6, 1)
        assert "NaN" in alone[0].error
        assert alone[0].token_ids == known[:4]
        runner = runner_with(model, config, 7, replaying({100: known}, lambda ids: ids))
        found = say(runner, rows, 6, 7)
        assert_same(found, alone)
        assert found[0].num_steps == 2


def continuation(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(CHANGES), st.sampled_from([1, 3, 4]))
def test_random_plans_say_what_single_requests_would(random: Random, change: str, block_size: int) -> None:
    """Rows end in the middle of what they get, leave, and come back in other slots with their tokens."""
    num_slots, room, limit = 4, 30, 9
    config = tiny_config(
        tiny_architecture(vocab_size=VOCAB),
        block_size=block_size,
        num_blocks=1 + num_slots * room,
        budget=200,
    )
    prompts = {seed: [random.randrange(VOCAB) for _ in range(random.randint(1, 6))] for seed in range(6)}
    known = {seed: continuation(prompt, 70) for seed, prompt in prompts.items()}
    proposers = replaying(known, changes(random, VOCAB)[change])
    runner = runner_with(EchoModel(VOCAB), config, limit, proposers)
    most = min(room * block_size, runner.facts.model.max_model_len) - 1
    said: dict[int, int] = dict.fromkeys(prompts, 0)
    running: dict[int, int] = {}  # slot to seed
    for step_id in range(1, 25):
        removed = [slot for slot in list(running) if random.random() < 0.15]
        for slot in removed:
            seed = running.pop(slot)
            said[seed] = max(0, said[seed] - random.choice([0, 0, 1, 3]))  # it had ended before them
        entering = {}
        for seed in random.sample(sorted(set(prompts) - set(running.values())), 2):
            free = [slot for slot in range(num_slots) if slot not in running]
            if free and len(prompts[seed]) + said[seed] < most and random.random() < 0.6:
                entering[random.choice(free)] = seed
                running.update(entering)
        new = [
            new_row(
                slot,
                prompts[seed] + known[seed][: said[seed]],
                range(1 + slot * room, 1 + (slot + 1) * room)[: -(-most // block_size)],
                num_prompt=len(prompts[seed]),
                seed=seed,
                slot_version=step_id,
            )
            for slot, seed in entering.items()
        ]
        computing = [
            slot
            for slot, seed in sorted(running.items())
            if len(prompts[seed]) + said[seed] < most and (slot in entering or random.random() < 0.8)
        ]
        left = {slot: most - len(prompts[running[slot]]) - said[running[slot]] for slot in computing}
        limits = {slot: min(random.randint(1, limit), left[slot]) for slot in computing}
        plan = step_plan(
            step_id,
            removed=removed,
            new=new,
            chunks={row.slot: row.num_known_tokens for row in new},
            skipped=sorted(set(running) - set(computing)),
            limits={slot: count for slot, count in limits.items() if count > 1},
        )
        result = runner.execute(plan)
        token_ids = iter(result.token_ids.tolist())
        counts = result.token_counts.tolist() or [1] * len(computing)
        for slot, count in zip(computing, counts, strict=True):
            seed = running[slot]
            assert 1 <= count <= limits[slot]
            assert [next(token_ids) for _ in range(count)] == known[seed][said[seed] : said[seed] + count]
            said[seed] += count
            if change == "right":
                assert count == limits[slot]


class Steady:
    """A `Proposer` that guesses the same token as often as it is asked to, for some slots."""

    def __init__(self, name: str, slots: Sequence[int]) -> None:
        self.name, self._slots = name, slots
        self.asked: list[dict[int, int]] = []

    def enter(self, row: NewRow) -> None: ...

    def leave(self, slot: int) -> None: ...

    def accept(self, slots: I64, counts: I64) -> None: ...

    def propose(self, slots: I64, limits: I64) -> Guesses:
        asked = dict(zip(slots.tolist(), limits.tolist(), strict=True))
        self.asked.append(asked)
        return Guesses.of([[5] * limit if slot in self._slots else [] for slot, limit in asked.items()])


class Slow(Steady):
    """One that `TakesTime`: so many seconds for each place."""

    def __init__(self, name: str, slots: Sequence[int], seconds: float | None) -> None:
        super().__init__(name, slots)
        self.seconds = seconds

    def place_seconds(self, num_rows: int) -> float | None:
        return self.seconds

    def take_seconds(self) -> float:
        return 0.02


def speculation_of(*proposers: Steady, num_rows: int) -> Speculation:
    """Return what guesses for rows that take 10 ms a step, and 0.1 ms more for each further position."""
    config = config_of("float32", "none")
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    rows = create_rows(tiny_facts(config, kv.max_model_len, kv.shape, max_samples_per_row=9))
    speculation = Speculation(rows, proposers, 8)
    for slot in range(num_rows):
        speculation.enter(new_row(slot, [5, 6, 7], blocks_of(slot)))
    for size in (num_rows, num_rows + 64):
        for _ in range(3):
            speculation._budget.note_step(
                num_rows, size - num_rows, num_rows, 0.01 + 1e-4 * (size - num_rows)
            )
    return speculation


def test_of_equal_proposers_the_one_that_takes_no_time_is_asked() -> None:
    slow, quick = Slow("slow", [0], 1e-3), Steady("quick", [0])
    speculation = speculation_of(slow, quick, num_rows=1)
    assert speculation._guess_next([0], 1)[0] > 0
    assert (len(slow.asked), len(quick.asked)) == (0, 1)
    for _ in range(10):  # until it is right so much more often that its time is worth it
        speculation._budget.note_verified(0, 0, 5, 5)
    speculation._ready.clear()
    speculation._guess_next([0], 1)
    assert (len(slow.asked), len(quick.asked)) == (1, 1)


def test_a_model_is_asked_for_as_many_guesses_as_are_worth_its_time() -> None:
    """It is so where another proposer has found nothing, too. As long as its time is not known that is one guess."""
    quick, slow = Steady("quick", [1]), Slow("slow", [0, 1, 2], 1e-3)
    speculation = speculation_of(quick, slow, num_rows=3)
    budget = speculation._budget
    for slot in range(3):
        for _ in range(20):
            budget.note_verified(slot, 0, 8, 8)
            budget.note_verified(slot, 1, 5, 3)
    limits = speculation._guess_next([0, 1, 2], 3)
    assert min(limits) >= 6, "the one that is nearly always right is hoped for"
    assert quick.asked == [dict(enumerate(limits))]
    assert set(slow.asked[0]) == {0, 2}
    assert 1 < max(slow.asked[0].values()) < min(limits)
    for seconds, expected in ((None, {0: 1, 2: 1}), (0.02, None)):
        slow.seconds = seconds
        slow.asked.clear()
        speculation._ready.clear()
        speculation._guess_next([0, 1, 2], 3)
        assert slow.asked == ([] if expected is None else [expected])


def test_rows_for_which_nothing_is_kept_are_not_guessed_for() -> None:
    """In a model with states those are the rows of later slots: they get one token in a step."""
    proposer = Steady("quick", [0, 1, 2])
    speculation = speculation_of(proposer, num_rows=3)
    speculation._rows.num_guessing_slots = 1
    limits = speculation._guess_and_count([0, 1, 2], 3)
    assert (limits[0] > 0, limits[1:]) == (True, [0, 0])
    assert speculation._guess_and_count([1, 2], 2) == [0, 0]
    assert proposer.asked == [{0: limits[0]}]


def test_the_account_hears_of_all_that_a_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own account, whether it guesses or takes in a prompt. A long look-up is the fault of what else runs."""
    clock = [0.0]

    def long(proposer: Steady) -> Steady:
        def propose(slots: I64, limits: I64, propose=proposer.propose) -> Guesses:
            clock[0] += 0.03
            return propose(slots, limits)

        proposer.propose = propose  # type: ignore[method-assign]
        return proposer

    monkeypatch.setattr(drafting.time, "perf_counter", lambda: clock[0])
    for proposer, lost in ((Slow("slow", [], 1e-4), 2), (Steady("quick", []), 1)):  # steps of 10 ms
        speculation = speculation_of(long(proposer), num_rows=1)
        before = speculation._budget._balance
        speculation._guess_next([0], 1)
        assert speculation._budget._balance == pytest.approx(before - lost)


class Keeping(Steady):
    """One that `ReadsStates`, and counts the steps of which it got some."""

    state_layers: tuple[int, ...] = ()
    num_taken = 0

    def take_states(self, step: StepRows, token_counts: I64 | None, states: torch.Tensor) -> None:
        self.num_taken += 1


def test_the_account_is_charged_with_states_until_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 2 ms to keep those of a step, which takes 10 ms, and half a percent of a step is allowed."""
    clock, proposer = itertools.count(step=0.002), Keeping("keeping", [])
    speculation = speculation_of(proposer, num_rows=1)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    step = StepRows(zero, one, np.full(1, 3), np.ones(1, np.bool_))
    budget = speculation._budget
    budget.least_chance = lambda *sizes: 2.0  # type: ignore[method-assign]
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: next(clock))
    num_taken = []
    for balance in (0.0, 0.0, 0.0, 0.0, -8.01, -6.1, -5.99):
        speculation._rest, before = 0, balance
        budget._balance = balance
        budget._gain(0.0)
        speculation.finish(step, None, 10_000_000, torch.zeros(1, 4))
        num_taken.append(proposer.num_taken)
    assert num_taken == [1, 2, 3, 4, 4, 4, 5]
    assert budget._balance == pytest.approx(before - 0.2 + 0.005)
