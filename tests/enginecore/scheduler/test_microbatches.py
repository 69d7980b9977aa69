"""Which rows each step computes where a worker's stages compute different steps at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.helpers.scheduling import (
    Engine,
    NaiveWorker,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from tests.helpers.stack import NaiveRunner, make_config
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore


def make_engine(num_stages: int, **config: Any) -> Engine:
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **config}
    return Engine(make_scheduler(num_stages=num_stages, **config))


def add(engine: Engine, numbers: range, *, prompt: int = 4, max_tokens: int = 40) -> None:
    for number in numbers:
        engine.add(make_request(number, make_prompt(prompt, number), max_tokens=max_tokens))


def computed(engine: Engine, plan: StepPlan | None) -> list[int]:
    """Return the numbers of the requests that a plan computes."""
    if plan is None:
        return []
    requests = engine.scheduler.snapshot().running
    skipped = set(plan.skipped_slots.tolist())
    return sorted(request.number for request in requests if request.slot not in skipped)


def plan_steps(engine: Engine, count: int, *, in_flight: int) -> list[list[int]]:
    """Plan steps, and take the oldest result in whenever so many are in flight; return who is in each."""
    planned = []
    for _ in range(count):
        while len(engine.plans) >= in_flight:
            engine.finish_step()
        planned.append(computed(engine, engine.plan()))
    return planned


def test_halves_take_turns() -> None:
    engine = make_engine(2)
    add(engine, range(6))
    assert plan_steps(engine, 1, in_flight=3) == [[0, 1, 2, 3, 4, 5]], "their prompts"
    engine.finish_step()
    assert plan_steps(engine, 6, in_flight=3) == [[0, 1, 2], [3, 4, 5]] * 3


def test_a_row_waits_for_its_token_to_pass_all_stages() -> None:
    engine = make_engine(3)
    add(engine, range(7))
    plan_steps(engine, 1, in_flight=4)
    engine.finish_step()
    steps = plan_steps(engine, 12, in_flight=4)
    assert steps[:3] == [[0, 1, 2], [3, 4, 5], [6]]
    assert steps == steps[:3] * 4


def test_parts_of_unequal_size_even_out() -> None:
    engine = make_engine(2)
    add(engine, range(6))
    plan_steps(engine, 5, in_flight=3)
    for number in (3, 4):
        engine.scheduler.requests.abort(0, number)
    sizes = [len(numbers) for numbers in plan_steps(engine, 8, in_flight=3)]
    assert sizes[-4:] == [2, 2, 2, 2]


def test_a_prompt_fills_the_stages_chunk_by_chunk() -> None:
    engine = make_engine(2, max_num_batched_tokens=100)
    add(engine, range(1), prompt=180)
    plans = [engine.plan() for _ in range(3)]
    assert [plan.num_tokens for plan in plans if plan is not None] == [50, 50, 50], "half of the budget each"


def test_a_prompt_that_cannot_be_cut_has_the_whole_budget() -> None:
    engine = make_engine(2, max_num_batched_tokens=100, enable_chunked_prefill=False, max_model_len=96)
    add(engine, range(1), prompt=90, max_tokens=2)
    plan = engine.plan()
    assert plan is not None
    assert plan.num_tokens == 90


def test_a_row_that_is_alone_is_planned_one_step_ahead() -> None:
    engine = make_engine(4)
    add(engine, range(1))
    assert plan_steps(engine, 3, in_flight=5) == [[0], [0], []]
    engine.finish_step()
    assert plan_steps(engine, 2, in_flight=5) == [[0], []]


def test_a_prompt_does_not_wait_for_a_row_that_is_alone() -> None:
    engine = make_engine(2)
    add(engine, range(1))
    assert plan_steps(engine, 1, in_flight=3) == [[0]]
    add(engine, range(1, 2))
    plan = engine.plan()
    assert plan is not None
    assert [len(plan.new_rows), plan.skipped_slots.tolist()] == [1, [0]]


def test_tokens_and_ends_are_those_of_one_stage() -> None:
    engine = make_engine(3, max_num_seqs=5, num_blocks=24, max_model_len=128)
    add(engine, range(12), prompt=23, max_tokens=30)
    for _ in range(2000):
        if len(engine.plans) < 4 and engine.plan() is not None:
            continue
        if not engine.plans:
            break
        engine.finish_step()
    for number in range(12):
        expected = naive_generation(make_prompt(23, number), number, SamplingParams(max_tokens=30), (), 128)
        assert engine.end_of(number) == expected


def test_an_operator_who_wants_fewer_steps_in_flight_gets_larger_ones() -> None:
    core = EngineCore(make_config(steps_in_flight=2, max_num_seqs=8, max_num_batched_tokens=64))
    core.worker_ready(replace(NaiveRunner(make_config()).facts, num_stages=4), after_crash=False)
    core.frontends.open_session(1)
    for number in range(8):
        core.frontends.submit(
            1, single_choice(number, str(number), [1, 2], SamplingParams(max_tokens=9), seed=number)
        )
    worker = NaiveWorker()
    prompts = core.plan()
    assert prompts is not None
    core.apply(worker.execute(prompts))
    plans = [core.plan() for _ in range(2)]
    assert [plan.num_tokens for plan in plans if plan is not None] == [4, 4], "halves, not quarters"
