"""A draft model guesses what it would say greedily, whatever was guessed before, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from tests.worker.runner.drafting.guessing import blocks_of, runner_with, say
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, tiny_architecture, tiny_facts
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.facts import WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.drafting import draft_model
from triptych_services.worker.runner.drafting.budget import GuessBudget
from triptych_services.worker.runner.drafting.costs import StepCosts
from triptych_services.worker.runner.drafting.draft_model import DraftModel, DraftModelProposer
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import KvPlan, plan_kv_cache
from triptych_services.worker.sampling.params import TokenHistory

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

VOCAB, NUM_NEW, MAX_LEN, MAX_SEQS, BLOCK_SIZE = 97, 13, 128, 7, 4
SAME, OTHER = 3, 4
"""Seeds of the weights of the model that is guessed for, and of another one."""


@cache
def parts(seed: int = SAME, vocab_size: int = VOCAB) -> tuple[nn.Module, ResolvedConfig, KvPlan]:
    architecture = tiny_architecture(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        eos_token_ids=(2,),
        max_position_embeddings=MAX_LEN,
    )
    engine = EngineConfig(
        model=ModelConfig(dtype="float32", batch_invariant="true"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=90),
        scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=160),
        worker=WorkerConfig(device="cpu"),
    )
    config = resolve_config(engine, architecture)
    return (
        load_model(config, RandomCheckpoint(architecture, seed=seed)),
        config,
        plan_kv_cache(config, 1 << 30),
    )


def draft_of(
    seed: int = SAME, *, num_blocks: int = 90, max_model_len: int = MAX_LEN, **changes
) -> DraftModel:
    """Return a draft model, its cache full of NaN."""
    model, config, plan = parts(seed, changes.pop("vocab_size", VOCAB))
    shape = replace(plan.shape, num_blocks=num_blocks)
    caches = allocate_kv_cache(shape, torch.device("cpu"), plan.places)
    for layer in caches:
        layer.blocks[1:] = float("nan")
    return DraftModel(
        model,
        create_attention(config),
        caches,
        shape,
        max_model_len,
        config.architecture.vocab_size,
        changes.pop("eos_token_ids", ()),
        **changes,
    )


class Drafting:
    """A proposer, and the texts of the rows that it guesses for."""

    def __init__(self, draft: DraftModel, *, part: int = 64) -> None:
        _, config, plan = parts()
        facts = tiny_facts(config, plan.max_model_len, plan.shape, max_samples_per_row=9)
        self.facts = replace(facts, max_num_batched_tokens=part)
        zeros = np.zeros(MAX_SEQS, np.int64)
        self.history = TokenHistory(np.zeros((MAX_SEQS, MAX_LEN), np.int32), zeros.copy(), zeros.copy())
        self.proposer = DraftModelProposer(draft, self.facts, history=self.history)
        self.num_total = self.proposer.num_free_blocks
        self.queries: list[int] = []
        """Tokens of each query that was computed."""
        forward = self.proposer._backend.forward

        def note_forward(sizes):
            self.queries.append(sizes.num_tokens)
            return forward(sizes)

        self.proposer._backend.forward = note_forward  # type: ignore[method-assign]

    def enter(self, slot: int, tokens: list[int]) -> None:
        self.proposer.enter(new_row(slot, tokens, range(0)))
        self.say(slot, tokens, first=0)
        self.history.num_prompt[slot] = len(tokens)

    def say(self, slot: int, tokens: list[int], first: int | None = None) -> None:
        """Let a row get tokens."""
        start = int(self.history.num_known[slot]) if first is None else first
        self.history.token_ids[slot, start : start + len(tokens)] = tokens
        self.history.num_known[slot] = start + len(tokens)
        self.proposer.accept(np.array([slot], np.int64), np.array([len(tokens)], np.int64))

    def ask(self, slot_to_limit: dict[int, int]) -> list[list[int]]:
        slots, limits = np.array(list(slot_to_limit.items()), np.int64).T
        guesses = self.proposer.propose(slots, limits)
        ends = np.cumsum(guesses.counts)
        return [ids.tolist() for ids in np.split(guesses.token_ids, ends[:-1])]

    def text(self, slot: int) -> list[int]:
        return self.history.token_ids[slot, : self.history.num_known[slot]].tolist()


@cache
def greedy(tokens: tuple[int, ...], seed: int = SAME) -> list[int]:
    """Return what a model says next, by the runner without guesses."""
    model, config, _ = parts(seed)
    row = new_row(0, list(tokens), range(1, 33), sampling=SamplingParams(temperature=0.0), seed=1)
    return say(runner_with(model, config, 1), [row], min(9, MAX_LEN - len(tokens)), 1)[0].token_ids


def test_guesses_are_what_the_model_says_whatever_was_guessed_before() -> None:
    """Rows get what was guessed, a part of it, or something else, and come and go."""
    random, drafting = Random(3), Drafting(draft_of(OTHER))
    live: set[int] = set()
    for _ in range(25):
        for slot in range(4):
            if slot not in live and random.random() < 0.6:
                drafting.enter(slot, [random.randrange(3, VOCAB) for _ in range(random.randint(1, 12))])
                live.add(slot)
            elif slot in live and (random.random() < 0.05 or len(drafting.text(slot)) > MAX_LEN - 20):
                drafting.proposer.leave(slot)
                live.discard(slot)
        asked = {slot: random.randint(1, 6) for slot in sorted(live) if random.random() < 0.7}
        guesses = drafting.ask(asked) if asked else []
        for (slot, limit), guess in zip(asked.items(), guesses, strict=True):
            assert guess == greedy(tuple(drafting.text(slot)), OTHER)[:limit]
            num_right = random.randint(0, len(guess))
            last = (
                guess[num_right]
                if num_right < len(guess) and random.random() < 0.3
                else random.randrange(VOCAB)
            )
            drafting.say(slot, [*guess[:num_right], last])
        for slot in live - set(asked):
            drafting.say(slot, [random.randrange(VOCAB) for _ in range(random.randint(1, 3))])
    for slot in live:
        drafting.proposer.leave(slot)
    assert drafting.proposer.num_free_blocks == drafting.num_total


def test_a_right_guess_is_not_computed_again() -> None:
    drafting = Drafting(draft_of())
    drafting.enter(0, [5, 6, 7, 8])
    (guess,) = drafting.ask({0: 4})
    drafting.say(0, [*guess, 30])  # four right guesses, and the token behind them
    drafting.queries.clear()
    drafting.ask({0: 3})
    assert drafting.queries == [2, 1, 1], "the last guess was not computed, nor what followed"
    drafting.say(0, [31])
    drafting.queries.clear()
    drafting.ask({0: 1})
    assert drafting.queries == [1]


def test_a_long_prompt_is_taken_in_by_parts_beside_others() -> None:
    prompt = [3 + number % 90 for number in range(100)]
    drafting = Drafting(draft_of(), part=40)
    drafting.enter(0, prompt)
    drafting.enter(1, [5, 6, 7])
    found = []
    for _ in range(4):
        drafting.queries.clear()
        long, short = drafting.ask({0: 2, 1: 2})
        assert max(drafting.queries) <= 40
        assert short == greedy((*drafting.text(1),))[:2]
        assert drafting.proposer.is_reading(0) is not bool(long)
        assert not drafting.proposer.is_reading(1)
        found.append(long)
        drafting.say(1, [9])
        drafting.say(0, [9])
    assert found[:2] == [[], []], "80 of 100 tokens were computed"
    assert found[2] == greedy((*prompt, 9, 9))[:2]
    assert found[3] == greedy((*prompt, 9, 9, 9))[:2]


def test_a_text_is_read_as_long_as_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of it takes 2 ms, beside 10 ms of a query."""
    drafting, now = Drafting(draft_of(), part=64), 0.0

    def tick() -> float:
        nonlocal now
        if drafting.queries:
            now += 0.01 + 0.002 * drafting.queries[-1]
        return now

    proposer = drafting.proposer
    proposer._token_seconds.clear()
    proposer._query_costs, proposer._token_limit_s = StepCosts(), 0.1
    monkeypatch.setattr(draft_model.time, "perf_counter", tick)

    def read(slot: int, seconds: float | None) -> tuple[list[int], bool, float]:
        proposer.allow_reading(seconds)
        drafting.queries.clear()
        (guess,) = drafting.ask({slot: 1})
        assert proposer.is_reading(slot) is (bool(drafting.queries) and not guess)
        return list(drafting.queries), bool(guess), round(proposer.take_reading_seconds(), 6)

    drafting.enter(0, [3 + number % 90 for number in range(100)])
    assert read(0, None) == ([64], False, 0.138), "nothing was measured"
    assert read(0, 0.0) == ([], False, 0.0), "it waits"
    assert read(0, 0.04) == ([18], False, 0.046), "as a token took before: 2.16 ms"
    assert read(0, 1e-9) == ([16], False, 0.042), "so all is read some time"
    assert read(0, 0.0) == ([2], True, 0.0), "what is left is no text"
    drafting.say(0, [9] * 17)
    assert read(0, 1.0) == ([17], True, 0.0)
    assert proposer.take_seconds() > 0


def test_a_long_prompt_empties_no_account() -> None:
    """The row has no guesses until all of it is read, and the model reads as long as it may without gaining."""
    budget = GuessBudget(1, 1, 4, {0: lambda num_rows: 1e-4})
    for _ in range(5):
        budget.note_step(1, 0, 1, 0.01)
    before = budget._balance
    seconds = 0.0
    while (allowed := budget.reading_seconds() or 0.0) > 0:
        assert allowed <= 0.005, "half of a step"
        seconds += allowed
        budget.note_reading(allowed)
    assert seconds == pytest.approx(32 * 0.01)
    assert budget._balance == before
    for _ in range(40):  # three tokens in a step: beyond the account, gains are for texts
        budget.note_step(1, 2, 3, 0.01)
    assert budget.reading_seconds() == pytest.approx(0.005)
    seconds = 0.0
    while (allowed := budget.reading_seconds() or 0.0) > 0:
        seconds += allowed
        budget.note_reading(allowed)
    assert 32 * 0.01 < seconds < 64.01 * 0.01


def test_a_row_without_room_is_left_to_others_until_there_is_some() -> None:
    drafting = Drafting(draft_of(num_blocks=1 + 6))
    drafting.enter(2, [5, 6])
    assert [len(guess) for guess in drafting.ask({2: 1})] == [1]
    drafting.enter(0, list(range(3, 15)))  # 12, and up to 3 guesses that are computed
    drafting.enter(1, list(range(5, 12)))
    assert [len(guess) for guess in drafting.ask({0: 4, 1: 4})] == [4, 0]
    assert drafting.proposer.num_free_blocks == 1
    drafting.say(0, [9] * 6)  # 18, and 3: six blocks of 4
    assert drafting.ask({0: 4}) == [[]]
    assert drafting.proposer.num_free_blocks == 5, "what it holds is of use for others"
    assert drafting.ask({1: 4}) == [greedy((*range(5, 12),))[:4]]
    drafting.proposer.leave(1)
    assert drafting.ask({0: 2}) == [greedy((*drafting.text(0),))[:2]]


def test_another_row_of_a_slot_owes_nothing_to_the_one_before() -> None:
    """Neither to its text, nor to the blocks that it held."""
    drafting, alone = Drafting(draft_of()), Drafting(draft_of())
    drafting.enter(0, [5, 6, 7, 8, 9, 10, 11])
    drafting.ask({0: 5})
    drafting.proposer.leave(0)
    for each in (drafting, alone):
        each.enter(0, [5, 6, 7, 20])
        each.queries.clear()
    assert drafting.ask({0: 5}) == alone.ask({0: 5}) == [greedy((5, 6, 7, 20))[:5]]
    assert drafting.queries == alone.queries == [4, 1, 1, 1, 1], "all of it was computed anew"


def test_nothing_is_guessed_behind_an_end_a_context_or_a_token_that_it_does_not_know() -> None:
    expected = greedy((5, 6, 7))
    drafting = Drafting(draft_of(eos_token_ids=(expected[2],)))
    drafting.enter(0, [5, 6, 7])
    assert drafting.ask({0: 6}) == [expected[: 1 + expected.index(expected[2])]]

    short = Drafting(draft_of(max_model_len=16))
    short.enter(0, list(range(3, 17)))  # 14 tokens; the guess behind 16 would need the 17th
    assert [len(guess) for guess in short.ask({0: 6})] == [3]
    short.say(0, [4, 4, 4])
    assert short.ask({0: 6}) == [[]]

    smaller = Drafting(draft_of(vocab_size=90))
    smaller.enter(0, [5, 91, 6])
    smaller.enter(1, [5, 6])
    assert [len(guess) for guess in smaller.ask({0: 3, 1: 3})] == [0, 3]


def test_it_says_what_a_place_takes_until_that_is_long_ago() -> None:
    drafting = Drafting(draft_of())
    drafting.enter(0, [3 + number % 90 for number in range(40)])
    seconds = drafting.proposer.place_seconds(1)
    assert seconds is not None, "it was measured before the first request"
    assert 0 < seconds <= (drafting.proposer.place_seconds(4) or 0)
    slots, counts = np.array([0], np.int64), np.array([1], np.int64)
    for _ in range(1200):
        drafting.proposer.accept(slots, counts)
    assert drafting.proposer.place_seconds(1) is None
    drafting.ask({0: 1})
    assert drafting.proposer.place_seconds(1) is None, "a prompt says nothing of a place"
    drafting.say(0, [5])
    drafting.ask({0: 6})
    assert drafting.proposer.place_seconds(1) is not None


def test_what_it_takes_is_the_fastest_query_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does something else meanwhile slows some of them."""
    now = iter(range(1000))  # each query takes one second before the first request
    monkeypatch.setattr(draft_model.time, "perf_counter", lambda: float(next(now)))
    drafting = Drafting(draft_of())
    assert drafting.proposer.take_seconds() == 0.0, "nothing for requests so far"

    def taken_by(seconds: float) -> float:
        nonlocal now
        now = iter([0, seconds])
        drafting.ask({0: 1})
        return drafting.proposer.take_seconds()

    drafting.enter(0, list(range(3, 15)))
    assert taken_by(50.0) == 12.0, "a size that is not known: as 12 queries of a token"
    taken = []
    for seconds in (1.0, 2.0, 3.0, 9.0):
        drafting.say(0, [7] * 15)
        taken.append(taken_by(seconds))
    assert taken == [1.0, 2.0, 1.0, 1.0]
    assert drafting.proposer.take_seconds() == 0.0


@pytest.mark.parametrize("seed", [SAME, OTHER])
@pytest.mark.parametrize("num_blocks", [90, 12])
def test_every_kind_of_request_says_the_same(seed: int, num_blocks: int) -> None:
    """Greedy requests of the same model get all that is guessed."""
    model, config, _ = parts()
    kinds = [*list(KINDS.values())[: MAX_SEQS - 1], SamplingParams(temperature=0.0, logprobs=2)]
    random = Random(7)
    rows = [
        new_row(
            slot,
            [random.randrange(3, VOCAB) for _ in range(5 + slot)],
            blocks_of(slot),
            sampling=sampling,
            seed=100 + slot,
        )
        for slot, sampling in enumerate(kinds)
    ]
    expected = say(runner_with(model, config, 1), rows, NUM_NEW, 1)
    made: list[DraftModelProposer] = []

    def create(facts: WorkerFacts, history: TokenHistory, forms: object) -> list[DraftModelProposer]:
        made.append(DraftModelProposer(draft_of(seed, num_blocks=num_blocks), facts, history=history))
        return made

    runner = runner_with(model, config, 5, create)
    found = say(runner, rows, NUM_NEW, 5)
    assert [replace(each, num_steps=0) for each in found] == [replace(each, num_steps=0) for each in expected]
    if seed == SAME and num_blocks == 90:
        assert found[-1].num_steps == 3  # 13 tokens in steps of 5, 5 and 3
    runner.reset()
    assert made[0].num_free_blocks == num_blocks - 1
