"""Guesses on an asynchronous device made of CPU tensors: they change no token, and other steps do not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from tests.worker.deferred import DeferredStream
from tests.worker.runner.cuda.test_decode_graph import FakeRecorder, recorder_in
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.runner.drafting.guessing import Replaying, blocks_of, changes, replaying, runner_with, say
from tests.worker.runner.drafting.test_guessed_requests import (
    CHANGES,
    MAX_SEQS,
    MOST_GUESSES,
    OWN,
    GuessedRequests,
    RealWorker,
    create_runner,
    let_the_budget_decide,
)
from tests.worker.runner.drafting.test_speculation import (
    NUM_NEW,
    VOCAB,
    assert_same,
    config_of,
    continuation,
    known_of,
    looking_back,
    needs_kernels,
    rows_of,
)
from tests.worker.runner.test_overlapped_steps import SmallMemory
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import EchoModel, new_row, step_plan, tiny_architecture, tiny_config
from triptych.types.facts import WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.base import PendingStep
from triptych_services.worker.runner.cuda.streams import DeviceTimes
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.graph_sizes import decode_buckets
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.sampling.params import TokenHistory


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    return recorder_in(monkeypatch)


def echo_runner(known: Sequence[int], limit: int, *, change=lambda ids: ids, model: EchoModel | None = None):
    """Return a runner of an `EchoModel` whose row of seed 100 says `known`, and its device."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    stream = DeferredStream()
    proposers = replaying({100: known}, change)
    return runner_with(model or EchoModel(VOCAB), config, limit, proposers, stream=stream), stream


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        ("float32", KINDS),
        pytest.param("bfloat16", KINDS, marks=pytest.mark.thorough),
        pytest.param("float32", looking_back(None), marks=pytest.mark.thorough),
    ],
    ids=["float32", "bfloat16", "looking back"],
)
def test_replayed_decodes_say_the_same(
    recorder: FakeRecorder, dtype: str, kinds: dict[str, SamplingParams]
) -> None:
    config = config_of(dtype, "none")
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    rows = rows_of(kinds)
    expected = say(runner_with(model, config, 1), rows, NUM_NEW, 1)
    assert not any(each.error for each in expected)
    for name, change in changes(Random(1), VOCAB).items():
        recorder.num_replayed = 0
        proposers = replaying(known_of(expected), change)
        found = say(runner_with(model, config, 5, proposers, stream=DeferredStream()), rows, NUM_NEW, 5)
        assert_same(found, expected)
        if name == "right":  # 13 tokens in steps of 5, 5 and 3
            assert [each.num_steps for each in found] == [3] * len(rows)
        if name == "wrong":
            assert [each.num_steps for each in found] == [NUM_NEW] * len(rows)
            assert recorder.num_replayed > 3


@needs_kernels
@pytest.mark.thorough
def test_recorded_triton_decodes_attend_to_guesses_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of decodes, in the interpreter, within graphs: rows that share blocks, and one that fills its own."""
    graphs = TracedGraphs(monkeypatch)
    for name, value in (
        ("create_graph_recorder", lambda device, enforce_eager: graphs),
        ("PagedAttention", lambda: PagedAttention("triton")),
    ):
        monkeypatch.setattr(f"triptych_services.worker.runner.model_runner.{name}", value)
    config = tiny_config(tiny_architecture(num_layers=1), num_blocks=60)
    model, num_new = load_model(config, RandomCheckpoint(config.architecture, seed=3)), 8
    rows = rows_of({name: KINDS[name] for name in ("greedy", "sampled")})
    expected = say(runner_with(model, config, 1, stream=DeferredStream()), rows, num_new, 1)
    graphs.num_replayed = 0
    proposers = replaying(known_of(expected), changes(Random(2), VOCAB)["some"])
    found = say(runner_with(model, config, 4, proposers, stream=DeferredStream()), rows, num_new, 4)
    assert_same(found, expected)
    assert sum(each.num_steps for each in found) < 2 * num_new
    assert graphs.num_replayed > 0


def test_each_guess_is_a_row_of_the_smallest_graph_that_holds_it(recorder: FakeRecorder) -> None:
    known = continuation([5, 6, 7], 13)
    model = EchoModel(VOCAB)
    runner, _ = echo_runner(known, 6, model=model)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    runner.capture_graphs(lambda progress: None)
    assert sizes == [*reversed(decode_buckets(4 + 4 * 5))], "four rows with five guesses each"
    sizes.clear()
    recorder.num_replayed = 0
    (found,) = say(runner, [new_row(0, [5, 6, 7], blocks_of(0), seed=100)], 13, 6)
    assert (found.token_ids, found.num_steps) == (known, 3)
    # the prompt with five guesses runs as it is; then 6 rows, and the one that is left
    assert sizes == [8, 8, 1]
    assert recorder.num_replayed == 2


def test_the_device_keeps_no_token_of_a_step_with_guesses() -> None:
    """The host reads them all before the next step, and says there what the last one of each row is."""
    known = continuation([5, 6, 7], 13)
    runner, _ = echo_runner(known, 4)
    runner.execute(step_plan(1, new=[new_row(3, [5, 6, 7], blocks_of(0), seed=100)], chunks={3: 3}))
    runner.execute(step_plan(2, limits={3: 4}))
    feedback = runner._inputs.feedback
    assert feedback is not None
    assert feedback.sampling_slots[:4].tolist() == [4] * 4, "behind the last of four slots"
    assert not feedback.is_awaited[:4].any()
    assert runner.execute(step_plan(3)).token_ids.tolist() == known[5:6]


@pytest.mark.parametrize("budget", [6, 9])
def test_no_graph_has_more_rows_than_a_step_has_tokens(recorder: FakeRecorder, budget: int) -> None:
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60, budget=budget)
    known = continuation([5, 6, 7], 9)
    model, proposers = EchoModel(VOCAB), replaying({100: known}, lambda ids: ids)
    runner = runner_with(model, config, 4, proposers, stream=DeferredStream())
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    runner.capture_graphs(lambda progress: None)
    assert max(sizes) == budget
    (found,) = say(runner, [new_row(0, [5, 6, 7], blocks_of(0), seed=100)], 9, 4)
    assert found.token_ids == known


class Knowing:
    """A `Proposer` for slot 0 that has guesses while a test says so."""

    name = "knowing"

    def __init__(self, history: TokenHistory, text: Sequence[int]) -> None:
        self.history, self.text = history, list(text)
        self.has_some = False
        self.asked: list[list[int]] = []
        """The text of the row, each time."""
        self.accepted: list[int] = []

    def enter(self, row: Any) -> None: ...

    def leave(self, slot: int) -> None: ...

    def accept(self, slots: I64, counts: I64) -> None:
        count = int(counts[0])
        self.accepted += self.history.token_ids[0, : self.history.num_known[0]][-count:].tolist()

    def propose(self, slots: I64, limits: I64) -> Guesses:
        known = self.history.token_ids[0, : self.history.num_known[0]].tolist()
        self.asked.append(known)
        return Guesses.of([self.text[len(known) : len(known) + int(limits[0])] if self.has_some else []])


def test_only_steps_that_may_have_guesses_wait_for_the_tokens_before() -> None:
    """And proposers read tokens that are known, however many steps are in flight."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    text = [5, 6, 7, *continuation([5, 6, 7], 20)]
    stream, made = DeferredStream(), list[Knowing]()

    def create(facts: WorkerFacts, history: TokenHistory, forms: object) -> list[Knowing]:
        made.append(Knowing(history, text))
        return made

    runner = runner_with(EchoModel(VOCAB), config, 4, create, stream=stream)
    (knowing,) = made
    row = new_row(0, text[:3], blocks_of(0), seed=100)
    pending = [runner.launch(step_plan(1, new=[row], chunks={0: 3})), runner.launch(step_plan(2))]
    pending.append(runner.launch(step_plan(3)))
    assert not any(read.done for read in stream.reads), "steps without guesses do not wait"
    result = pending[0].wait()
    assert result.guess_counts.size == 0, "none was found"
    assert knowing.asked == [text[:4]]
    knowing.has_some = True
    assert pending[1].wait().guess_counts.tolist() == [3]
    guessing = runner.launch(step_plan(4, limits={0: 4}))
    assert all(read.done for read in stream.reads), "the tokens before are read, and those of the step itself"
    assert guessing.is_done()
    assert [step.wait().token_ids.tolist() for step in pending] == [[text[3]], [text[4]], [text[5]]]
    assert guessing.wait().token_ids.tolist() == text[6:10]
    plain = [runner.launch(step_plan(step_id)) for step_id in (5, 6)]
    assert not any(step.is_done() for step in plain)
    assert [step.wait().token_ids.tolist() for step in plain] == [[text[10]], [text[11]]]
    assert knowing.accepted == text[3:12]
    assert knowing.asked == [text[:count] for count in (4, 5, 6, 10, 11, 12)]


def test_waits_around_steps_with_guesses_are_charged_to_guesses() -> None:
    """The shortest one counts: the device may have waited for a request."""
    known = continuation([5, 6, 7], 20)
    runner, stream = echo_runner(known, 4)
    speculation = runner._speculation
    assert isinstance(speculation, Speculation)
    charged: list[tuple[int, float]] = []
    speculation.note_wait = lambda num_rows, seconds: charged.append((num_rows, seconds))  # type: ignore[method-assign]
    plans = [
        step_plan(1, new=[new_row(0, [5, 6, 7], blocks_of(0), seed=100)], chunks={0: 3}),
        step_plan(2),
        step_plan(3, limits={0: 4}),
        step_plan(4),
        step_plan(5),
        step_plan(6, limits={0: 3}),
    ]
    for plan in plans:
        stream.times = DeviceTimes(busy_ns=5_000, gap_ns=(9, 8, 70, 300, 7, 60)[plan.step_id - 1])
        runner.execute(plan)
    assert charged == [(1, pytest.approx(gap * 1e-9)) for gap in (70, 70, 60)]


def test_guesses_of_a_slot_are_those_of_the_row_that_is_in_it() -> None:
    """A row leaves while its step is in flight, and another takes its slot."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    known = {100: continuation([5, 6, 7], 9), 101: continuation([9, 8], 9)}
    made: list[Replaying] = []

    def create(facts: WorkerFacts, history: TokenHistory, forms: object) -> list[Replaying]:
        made.append(Replaying(history, known, lambda ids: ids))
        return made

    runner = runner_with(EchoModel(VOCAB), config, 4, create, stream=DeferredStream())
    rows = [
        new_row(0, [5, 6, 7], blocks_of(0), seed=100),
        new_row(0, [9, 8], blocks_of(1), seed=101, slot_version=2),
    ]
    first = runner.launch(step_plan(1, new=rows[:1], chunks={0: 3}))
    second = runner.launch(step_plan(2, removed=[0], new=rows[1:], chunks={0: 2}))
    assert first.wait().guess_counts.size == 0
    assert second.wait().guess_counts.tolist() == [3]
    assert runner.execute(step_plan(3, limits={0: 4})).token_ids.tolist() == known[101][1:5]
    assert made[0].num_accepted == {101: 5}


def test_a_step_without_memory_for_guesses_is_computed_without_them() -> None:
    known = continuation([5, 6, 7], 9)
    model = SmallMemory(VOCAB)
    runner, _ = echo_runner(known, 4, model=model)
    runner.execute(step_plan(1, new=[new_row(0, [5, 6, 7], blocks_of(0), seed=100)], chunks={0: 3}))
    model.max_tokens = 1
    result = runner.execute(step_plan(2, limits={0: 4}))
    assert (result.token_ids.tolist(), result.guesses) == (known[1:2], ())
    model.max_tokens = 4
    assert runner.execute(step_plan(3, limits={0: 4})).token_ids.tolist() == known[2:6]


def test_a_row_without_finite_logits_gets_the_tokens_before_and_then_fails() -> None:
    known = continuation([5, 6, 7], 6)
    runner, _ = echo_runner(known, 7, model=EchoModel(VOCAB, poisoned_tokens=[known[3]]))
    (found,) = say(runner, [new_row(0, [5, 6, 7], blocks_of(0), seed=100)], 6, 7)
    assert (found.token_ids, found.num_steps) == (known[:4], 2)
    assert "NaN" in found.error


class DeviceWorker(RealWorker):
    """A runner with several steps in flight, launched when they are planned."""

    def __init__(self, runner: ModelRunner) -> None:
        self.flying: deque[PendingStep] = deque()
        super().__init__(runner)

    def reset(self) -> None:
        self.flying.clear()
        super().reset()

    def launch(self, plan: StepPlan) -> None:
        self.flying.append(self.runner.launch(plan))

    def execute(self, plan: StepPlan, failing_slots: Sequence[int] = ()) -> StepResult:
        result = self.flying.popleft().wait()
        assert result.step_id == plan.step_id
        return result


class GuessedOnDevice(GuessedRequests):
    """The same with a device that says nothing before it is waited for. No model and no layer guesses there."""

    @initialize(
        num_guesses=st.integers(0, MOST_GUESSES),
        change=st.sampled_from((OWN, OWN, *CHANGES)),
        spare_blocks=st.integers(0, 20),
        budget=st.integers(MAX_SEQS, 40),
        max_num_seqs=st.integers(1, MAX_SEQS),
        has_budget=st.booleans(),
    )
    def draw(self, **drawn: Any) -> None:
        self.start(**drawn)

    def create_worker(self) -> RealWorker:
        runner = create_runner(self.num_guesses, self.guessed, stream=DeferredStream())
        if self.has_budget:
            let_the_budget_decide(runner)
        return DeviceWorker(runner)


TestGuessedOnDevice = pytest.mark.thorough(GuessedOnDevice.TestCase)
TestGuessedOnDevice.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@needs_kernels
@pytest.mark.parametrize("change", [OWN, "some"])
def test_crowded_requests_say_what_they_say_alone(change: str, recorder: FakeRecorder) -> None:
    """Too few blocks for all of them, a limit in the middle of what a row gets, and two steps in flight."""
    machine = GuessedOnDevice()
    machine.start(
        num_guesses=5, change=change, spare_blocks=4, budget=24, max_num_seqs=MAX_SEQS, has_budget=False
    )
    for number, kind in enumerate(("greedy", "sampled", "penalties", "stops", "form")):
        machine.submit([5, 6, 7, 5, 6], kind, 5 * (number % 2), 9 if number == 2 else None, 1)
    machine.run_for_a_while(6, 2)
    machine.lose_worker()
    machine.teardown()
    counters = machine.engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_accepted_guesses > 0
    assert recorder.num_replayed > 0
