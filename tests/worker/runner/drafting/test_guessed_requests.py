"""The real scheduler, a real runner and its guesses: requests say what they say without guesses, whatever happens.

The model is a recorded program. Requests are aborted, preempted and sent anew; workers are lost and sleep; rows end in
the middle of what they get.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from llguidance import LLMatcher
from torch import nn

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer, write_model_directory
from tests.helpers.journals import RecordedRun, replayed
from tests.helpers.scheduling import Clock, Engine
from tests.worker.runner.drafting.guessing import Replaying, changes, make_up_times, runner_with
from tests.worker.tiny import tiny_architecture
from triptych.checkpoint.architecture import LayerSpec, ModelArchitecture, StateSpec
from triptych.checkpoint.eagle import Eagle3Spec
from triptych.checkpoint.mtp import MtpNames, MtpSpec
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.config.step_size import size_for_worker
from triptych.types.facts import WorkerFacts
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.structured import StructuredOutputs, compiled
from triptych.types.submit import RequestHead, SubmitRequest
from triptych_kernels.cpu.library import isa
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.enginecore.scheduler.step_results import Finished
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.checkpoint_tensors import checkpoint_targets
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.models.decoder import MtpLayer
from triptych_services.worker.models.eagle import Eagle3Head
from triptych_services.worker.runner.drafting.base import Proposer
from triptych_services.worker.runner.drafting.create import proposers_of
from triptych_services.worker.runner.drafting.draft_model import PART, DraftModel, DraftModelProposer
from triptych_services.worker.runner.drafting.grammar import FormMatchers
from triptych_services.worker.runner.drafting.heads import Eagle3Proposer, HeadProposer, MtpProposer
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.params import TokenHistory

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_id(EOS)
VOCAB = TOKENIZER.vocab_size + 5
MAX_SEQS, MAX_LEN, BLOCK_SIZE, MOST_GUESSES = 4, 48, 4, 8
STATE_INTERVAL, MOST_BESIDE_STATES = 20, 3
CHANGES = tuple(changes(Random(0), VOCAB))
OWN = "own"
"""The project's own proposers, in place of one that knows what comes."""
SAME_DRAFT, OTHER_DRAFT = "a draft model that is the same", "another draft model"
DRAFT_TO_SEED = {SAME_DRAFT: 3, OTHER_DRAFT: 4}
FURTHER_LAYER, EAGLE_HEAD = "a layer of the checkpoint", "an EAGLE-3 head"
HEADS = (FURTHER_LAYER, EAGLE_HEAD)
LOADED = (*DRAFT_TO_SEED, *HEADS)
DRAFT_BLOCKS = 20
"""Blocks of the cache of a draft model or a layer: too few for all rows."""


@cache
def form() -> StructuredOutputs:
    return compiled(LLMatcher.grammar_from_regex("(ab|cd|[e-h])+"))


def kinds() -> dict[str, SamplingParams]:
    """Return requests that ask for different things, by name."""
    return {
        "greedy": SamplingParams(temperature=0.0),
        "sampled": SamplingParams(temperature=1.3, top_p=0.9),
        "few": SamplingParams(temperature=0.9, top_k=7),
        "penalties": SamplingParams(temperature=0.7, frequency_penalty=1.5, repetition_penalty=1.2),
        "bad words": SamplingParams(temperature=0.0, bad_words=((5,), (7, 8), (30,))),  # type: ignore[arg-type]
        "bound to end": SamplingParams(temperature=1.0, min_tokens=4, logit_bias=((EOS_ID, 3.0),)),
        "stops": SamplingParams(temperature=1.0, stop_token_ids=tuple(range(0, VOCAB, 11))),
        "form": SamplingParams(temperature=0.0, structured_outputs=form()),
        "sampled form": SamplingParams(temperature=1.0, top_k=9, structured_outputs=form()),
        "no guesses": SamplingParams(temperature=1.0, speculation=False),
    }


def mixers() -> Iterator[LayerSpec]:
    """Yield layers with a state of each kind."""
    heads = {"num_heads": 4, "value_dim": 10, "num_key_heads": 2, "key_dim": 6}
    for spec in (
        StateSpec("gated_delta", taps=4, norm="before_gate", **heads),  # type: ignore[arg-type]
        StateSpec("mamba2", taps=3, **heads),  # type: ignore[arg-type]
        StateSpec("mamba", taps=4, num_heads=1, value_dim=80, key_dim=6, dt_rank=5, conv_bias=True),
        StateSpec("short_conv", taps=3, num_heads=1, value_dim=64),
    ):
        yield LayerSpec(
            num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, attention="none", state=spec
        )


class LoudMixers(RandomCheckpoint):
    """Random weights with which a wrong state changes the next tokens."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return super().read(name, dtype) * (15 if ".mixer." in name else 1)


@cache
def parts(
    seed: int = DRAFT_TO_SEED[SAME_DRAFT], *, has_states: bool = False
) -> tuple[nn.Module, ResolvedConfig, GrammarCompiler]:
    architecture = tiny_architecture(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        eos_token_ids=(EOS_ID,),
        max_position_embeddings=MAX_LEN,
    )
    if has_states:
        architecture = replace(architecture, layers=(*architecture.layers[:1], *mixers()))
    engine = EngineConfig(
        model=ModelConfig(dtype="float32", batch_invariant="true"),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=1 + MAX_SEQS * MAX_LEN // BLOCK_SIZE,
            state_interval=STATE_INTERVAL,
        ),
        scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=40),
        worker=WorkerConfig(device="cpu"),
    )
    config = resolve_config(engine, architecture)
    directory = write_model_directory(Path(tempfile.mkdtemp()))
    grammars = GrammarCompiler(directory, vocab_size=VOCAB, eos_token_ids=(EOS_ID,))
    checkpoint = (LoudMixers if has_states else RandomCheckpoint)(architecture, seed=seed)
    return load_model(config, checkpoint), config, grammars


def create_draft(seed: int, facts: WorkerFacts, history: TokenHistory) -> DraftModelProposer:
    """Create the proposer of a draft model with these weights."""
    model, config, _ = parts(seed)
    return DraftModelProposer(draft_of(model, config), facts, history=history)


def create_mtp(facts: WorkerFacts, history: TokenHistory, *, has_states: bool) -> MtpProposer:
    """Create the proposer of a layer with random weights that goes on from the model's states."""
    model, config, _ = parts(has_states=has_states)
    architecture = replace(config.architecture, layers=config.architecture.layers[:1])
    config, spec = (
        replace(config, architecture=architecture),
        MtpSpec("model.mtp", architecture.layers[0], MtpNames(), 1),
    )
    layer = with_random_weights(MtpLayer(spec, context=ModelContext(config)), architecture)
    layer.share(model)  # type: ignore[arg-type]
    return MtpProposer(head_of(layer, config, facts), facts, history=history)


def create_eagle(facts: WorkerFacts, history: TokenHistory, *, has_states: bool) -> Eagle3Proposer:
    """Create the proposer of a head with random weights and fewer tokens, the last ones of the model."""
    model, config, _ = parts(has_states=has_states)
    own, num_tokens = config.architecture, 30
    architecture = replace(own, layers=own.layers[:1], vocab_size=num_tokens, tie_word_embeddings=False)
    spec = Eagle3Spec(architecture, VOCAB, own.hidden_size, (2, 0, 1), True, False)
    config = replace(config, architecture=architecture)
    head = with_random_weights(Eagle3Head(spec, context=ModelContext(config)), architecture)
    head.share(model)  # type: ignore[arg-type]
    return Eagle3Proposer(
        replace(head_of(head, config, facts), vocab_size=num_tokens),
        facts,
        history=history,
        layers=spec.layers,
        state_size=len(spec.layers) * own.hidden_size,
        combine=head.combine,
        tokens=torch.arange(VOCAB - num_tokens, VOCAB),
    )


def with_random_weights(head: Any, architecture: ModelArchitecture) -> Any:
    """Fill a head with weights, and return it."""
    generator = torch.Generator().manual_seed(6)
    head.load_weights(
        (name, torch.randn(target.checkpoint_shape, generator=generator) * 0.1)
        for name, target in checkpoint_targets(head, architecture).items()
    )
    return head


def head_of(head: nn.Module, config: ResolvedConfig, facts: WorkerFacts) -> DraftModel:
    """Return what guesses from states with a small cache."""
    states = torch.zeros(min(PART, facts.max_num_batched_tokens), config.architecture.hidden_size)
    return replace(draft_of(head, config), states_before=states)


def draft_of(model: nn.Module, config: ResolvedConfig) -> DraftModel:
    """Return what guesses with a small cache, which is full of NaN."""
    plan = plan_kv_cache(config, 1 << 30)
    shape = replace(plan.shape, num_blocks=DRAFT_BLOCKS)
    caches = allocate_kv_cache(shape, torch.device("cpu"), plan.places)
    for layer in caches:
        layer.blocks[1:] = float("nan")
    sizes = plan.max_model_len, VOCAB, (EOS_ID,)
    return DraftModel(model, create_attention(config), caches, shape, *sizes)  # type: ignore[arg-type]


@dataclass
class Guessed:
    """A `CreateProposers` of which the proposer and what it knows may be changed while it runs."""

    change: str = OWN
    has_states: bool = False
    known: dict[int, Sequence[int]] = field(default_factory=dict)
    """Seed of a row -> all tokens that it will say."""
    random: Random = field(default_factory=lambda: Random(5))

    def __call__(
        self, facts: WorkerFacts, history: TokenHistory, forms: FormMatchers | None
    ) -> Sequence[Proposer]:
        if self.change in DRAFT_TO_SEED:
            return [create_draft(DRAFT_TO_SEED[self.change], facts, history)]
        if self.change in HEADS:
            create = create_mtp if self.change == FURTHER_LAYER else create_eagle
            return [create(facts, history, has_states=self.has_states)]
        if self.change != OWN:
            return [Replaying(history, self.known, changes(self.random, VOCAB)[self.change])]
        return proposers_of(SpeculativeConfig(enabled="true", suffix_mib=1))(facts, history, forms)


def create_runner(
    num_guesses: int, proposers: Guessed, *, has_states: bool = False, **arguments: Any
) -> ModelRunner:
    model, config, grammars = parts(has_states=has_states)
    return runner_with(model, config, 1 + num_guesses, proposers, grammars=grammars, **arguments)


def let_the_budget_decide(runner: ModelRunner) -> None:
    """Verify what the budget allots, with made-up times of steps, in place of all guesses that there are."""
    if runner._speculation is None:
        return
    budget = runner._speculation._budget
    for name in ("least_chance", "needs_plain", "allot", "prices", "_gain"):
        delattr(budget, name)
    make_up_times(runner._speculation)


def create_scheduler(
    facts: WorkerFacts, *, num_blocks: int, clock: Callable[[], float], **config: Any
) -> Scheduler:
    kv = replace(facts.kv, num_blocks=num_blocks, soft_num_blocks=None)
    if kv.page_bytes:
        kv = replace(kv, num_state_blocks=min(num_blocks // 4, kv.num_state_blocks))
    sizes = size_for_worker(SchedulerConfig(**config), facts.max_num_seqs, facts.max_num_batched_tokens)
    return Scheduler(sizes, replace(facts, kv=kv), enable_prefix_caching=True, clock=clock)


def create_choices(
    numbers: Sequence[int],
    prompt: Sequence[int],
    sampling: SamplingParams,
    emitted: Sequence[Sequence[int]] = (),
) -> list[Request]:
    """Return the choices of one request. The seed of each is its number."""
    submit = SubmitRequest(
        head=RequestHead(f"r{numbers[0]}", tenant="t"),
        numbers=np.array(numbers, np.uint32),
        seeds=np.array(numbers, np.uint64),
        prompt_token_ids=np.array(prompt, np.uint32),
        emitted=tuple(np.array(each, np.uint32) for each in emitted),
        sampling=sampling,
    )
    return Request.choices_of(submit, session=0, guesses=True)


class RealWorker:
    """A runner in the place of the naive worker of `Engine`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.reset()

    def reset(self) -> None:
        self.runner.reset()

    def launch(self, plan: StepPlan) -> None:
        """Do nothing: a step is computed when its result is asked for."""

    def execute(self, plan: StepPlan, failing_slots: Sequence[int] = ()) -> StepResult:
        return self.runner.execute(plan)


class RealEngine(Engine):
    """An `Engine` with a `RealWorker`. It checks that what each request is said to owe to guesses is what it got."""

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.worker.launch(plan)  # type: ignore[attr-defined]
        return plan

    def lose_worker(self) -> None:
        self.plans.clear()
        self.worker.reset()  # type: ignore[attr-defined]
        self.scheduler.requeue_all()
        self.scheduler.check_integrity()


@cache
def said_alone(
    prompt: tuple[int, ...], kind: str, number: int, has_states: bool
) -> tuple[list[int], FinishReason]:
    """Return the tokens of a request that runs alone without guesses, and its end."""
    runner = alone(has_states)
    engine = RealEngine(
        create_scheduler(runner.facts, num_blocks=runner.facts.kv.num_blocks, clock=time.monotonic),
        RealWorker(runner),  # type: ignore[arg-type]
    )
    engine.add_choices(*create_choices([number], prompt, sampling_of(kind)))
    while engine.scheduler.has_work:
        engine.run_while_it_can()  # a form is compiled meanwhile
    tokens, reason, _ = engine.end_of(number)
    assert not engine.num_together[0, number]
    return tokens, reason


@cache
def alone(has_states: bool) -> ModelRunner:
    return create_runner(0, Guessed(), has_states=has_states)


def sampling_of(kind: str) -> SamplingParams:
    return replace(kinds()[kind], max_tokens=MAX_LEN)


class GuessedRequests(RuleBasedStateMachine):
    """One scheduler, one runner that guesses, and up to four steps in flight."""

    @initialize(
        num_guesses=st.integers(0, MOST_GUESSES),
        change=st.sampled_from((OWN, OWN, *CHANGES, *LOADED, *LOADED)),
        spare_blocks=st.integers(0, 20),
        budget=st.integers(MAX_SEQS, 40),
        max_num_seqs=st.integers(1, MAX_SEQS),
        has_budget=st.booleans(),
        has_states=st.booleans(),
    )
    def draw(self, *, change: str, has_states: bool, **sizes: Any) -> None:
        """Start; heads beside states, which take long to record, have a test of their own."""
        self.start(change=OWN if has_states and change in LOADED else change, has_states=has_states, **sizes)

    def start(
        self,
        num_guesses: int,
        change: str,
        spare_blocks: int,
        budget: int,
        max_num_seqs: int,
        has_budget: bool,
        has_states: bool = False,
    ) -> None:
        if has_states:
            num_guesses = min(num_guesses, MOST_BESIDE_STATES)
        self.has_states = has_states
        self.guessed = Guessed(change, has_states)
        self.num_guesses, self.has_budget, self.clock = num_guesses, has_budget, Clock()
        self.config = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
        self.num_blocks = 1 + MAX_LEN // BLOCK_SIZE + spare_blocks
        worker = self.create_worker()
        self.engine = RealEngine(self.create_scheduler(worker.runner.facts), worker)  # type: ignore[arg-type]
        self.expected: dict[int, tuple[list[int], FinishReason]] = {}
        self.until: dict[int, int] = {}
        """Number -> tokens with which a frontend finds a stop string, and ends it."""
        self.aborted: set[int] = set()
        self.number = 0

    def create_worker(self) -> RealWorker:
        runner = create_runner(self.num_guesses, self.guessed, has_states=self.has_states)
        if self.has_budget:
            let_the_budget_decide(runner)
        return RealWorker(runner)

    def create_scheduler(self, facts: WorkerFacts) -> Scheduler:
        return create_scheduler(facts, num_blocks=self.num_blocks, clock=self.clock, **self.config)

    @rule(
        prompt=st.lists(st.integers(3, 12), min_size=1, max_size=14),
        kind=st.sampled_from(sorted(kinds())),
        num_emitted=st.sampled_from([0, 0, 0, 1, 5]),
        until=st.none() | st.integers(1, 12),
        num_choices=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(
        self, prompt: list[int], kind: str, num_emitted: int, until: int | None, num_choices: int
    ) -> None:
        """Send a request, or one that has moved here with what it has said."""
        numbers = range(self.number + 1, self.number + 1 + num_choices)
        self.number += num_choices
        emitted = []
        for number in numbers:
            tokens, reason = said_alone(tuple(prompt), kind, number, self.has_states)
            emitted.append(tokens[: min(num_emitted, len(tokens) - 1)])
            self.guessed.known[number] = tokens
            self.expected[number] = tokens[len(emitted[-1]) :], reason
            if until is not None:
                self.until[number] = until
        self.engine.add_choices(
            *create_choices(numbers, prompt, sampling_of(kind), emitted if any(emitted) else ())
        )

    @precondition(lambda self: len(self.engine.plans) < 4)
    @rule()
    def schedule(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.plans)
    @rule()
    def update(self) -> None:
        self.engine.finish_step()
        for number, until in self.until.items():
            if len(self.engine.tokens[0, number]) >= until:
                self.end(number)

    @rule(num_steps=st.integers(1, 9), steps_in_flight=st.integers(1, 4))
    def run_for_a_while(self, num_steps: int, steps_in_flight: int) -> None:
        for _ in range(num_steps):
            while len(self.engine.plans) < steps_in_flight and self.engine.plan() is not None:
                pass
            if self.engine.plans:
                self.update()
            self.clock.now += 0.01

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.end(list(self.expected)[choice % len(self.expected)])

    def end(self, number: int) -> None:
        if (outcome := self.engine.scheduler.requests.abort(0, number)) is not None:
            self.engine.note(outcome)
            self.aborted.add(number)

    @rule()
    def lose_worker(self) -> None:
        self.engine.lose_worker()

    @rule(spare_blocks=st.integers(0, 20))
    def sleep_and_wake(self, spare_blocks: int) -> None:
        """Another runner takes the place of the one that slept, with other blocks."""
        self.num_blocks = 1 + MAX_LEN // BLOCK_SIZE + spare_blocks
        self.engine.plans.clear()
        worker = self.create_worker()
        successor = self.create_scheduler(worker.runner.facts)
        assert successor.adopt(self.engine.scheduler) == ()
        self.engine.scheduler, self.engine.worker = successor, worker  # type: ignore[assignment]
        self.engine.lose_worker()

    @invariant()
    def says_what_it_says_alone(self) -> None:
        for number, (tokens, _) in getattr(self, "expected", {}).items():
            found = self.engine.tokens[0, number]
            assert found == tokens[: len(found)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.engine.scheduler.has_work:
                break
            self.run_for_a_while(20, 2)
        self.says_what_it_says_alone()
        for number, (tokens, reason) in self.expected.items():
            outcome = self.engine.outcomes[0, number]
            assert isinstance(outcome, Finished), outcome
            assert outcome.request.timings.num_accepted_guesses == self.engine.num_together[0, number]
            if number not in self.aborted:
                assert (self.engine.tokens[0, number], outcome.reason) == (tokens, reason)
        assert self.engine.scheduler.snapshot().num_used_blocks == 0
        runner = self.engine.worker.runner  # type: ignore[attr-defined]
        runner.reset()
        if runner._speculation is not None:
            for proposer in runner._speculation._proposers:
                if isinstance(proposer, DraftModelProposer):
                    assert proposer.num_free_blocks == DRAFT_BLOCKS - 1
                if isinstance(proposer, HeadProposer):
                    assert proposer.num_waiting == 0


TestGuessedRequests = pytest.mark.thorough(GuessedRequests.TestCase)
TestGuessedRequests.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("change", "has_states"),
    [
        (OWN, False),
        pytest.param("some", False, marks=pytest.mark.thorough),
        (SAME_DRAFT, False),
        (FURTHER_LAYER, False),
        pytest.param(EAGLE_HEAD, False, marks=pytest.mark.thorough),
        ("some", True),
        *(pytest.param(change, True, marks=pytest.mark.thorough) for change in (SAME_DRAFT, *HEADS)),
    ],
)
def test_crowded_requests_say_what_they_say_alone(change: str, has_states: bool) -> None:
    """Too few blocks for all of them, and a limit in the middle of what a row gets."""
    machine = GuessedRequests()
    machine.start(
        num_guesses=5,
        change=change,
        spare_blocks=4,
        budget=24,
        max_num_seqs=MAX_SEQS,
        has_budget=False,
        has_states=has_states,
    )
    for number, kind in enumerate(("greedy", "sampled", "penalties", "stops", "form")):
        machine.submit([5, 6, 7, 5, 6], kind, 5 * (number % 2), 9 if number == 2 else None, 1)
    machine.run_for_a_while(6, 2)
    machine.lose_worker()
    machine.teardown()
    counters = machine.engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_guesses > 0
    assert counters.num_accepted_guesses >= sum(machine.engine.num_together.values())
    assert counters.num_accepted_guesses > 0 or change in HEADS, "random weights are seldom right"


@pytest.mark.thorough
def test_what_rows_with_guesses_leave_is_hit_by_others() -> None:
    """Guesses are right at every place before the end of a page of states."""
    machine = GuessedRequests()
    machine.start(
        num_guesses=MOST_BESIDE_STATES, change="right", spare_blocks=36, budget=40, max_num_seqs=MAX_SEQS,
        has_budget=False, has_states=True,
    )  # fmt: skip
    for first in range(4):
        prompt = [5 + first, *range(6, 14 + first)]
        machine.submit(prompt, "greedy", 0, None, 1)
        said = machine.expected[machine.number][0][: STATE_INTERVAL + 1 - len(prompt)]
        machine.run_for_a_while(9, 2)
        machine.run_for_a_while(9, 2)
        hits = machine.engine.scheduler.counters.prefix_hits
        machine.submit([*prompt, *said], "greedy", 0, None, 1)
        machine.run_for_a_while(9, 2)
        assert machine.engine.scheduler.counters.prefix_hits == hits + STATE_INTERVAL
    machine.teardown()


def test_a_journal_of_guesses_replays_exactly(tmp_path: Path) -> None:
    """Two steps are in flight, blocks are scarce, and the worker is lost once."""
    run = RecordedRun(tmp_path, max_num_batched_tokens=40)
    runner = create_runner(4, Guessed())
    runner._facts = replace(runner.facts, kv=replace(runner.facts.kv, num_blocks=26))
    run.runner = runner  # type: ignore[assignment]
    run.start()
    for number in range(6):
        run.submit(
            [5, 6, 7, 5, 6, number],
            sampling={"temperature": number / 9, "max_tokens": 40, "ignore_eos": True},
        )
    run.run(12)
    run.engine.frontends.abort(1, 2)
    run.lose_worker()
    run.connect(after_crash=True)
    run.run()
    assert run.engine.scheduler is not None
    counters = run.engine.scheduler.counters
    run.engine.close()
    assert counters.num_preemptions > 0
    assert counters.num_accepted_guesses > 0
    result = replayed(tmp_path)
    assert result.divergence is None, result
    assert result.ending == "the recording ended: the engine stopped"
