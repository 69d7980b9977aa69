"""A worker that is not ready to sample a row: the row leaves the step, and is planned again a little later."""

from __future__ import annotations

import pytest

from tests.helpers.scheduling import (
    Clock,
    Engine,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.request import RequestState


def expected(number: int, prompt: list[int], max_tokens: int) -> list[int]:
    return naive_generation(prompt, number, SamplingParams(max_tokens=max_tokens), (), 2048)[0]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("max_samples_per_row", [1, 3])
def test_deferred_row_gets_the_same_tokens_later(steps_in_flight: int, max_samples_per_row: int) -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, max_samples_per_row=max_samples_per_row)
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    prompts = [make_prompt(40, seed=number) for number in range(3)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=12))
    for _ in range(steps_in_flight):
        engine.plan()
    output = engine.finish_step(deferred_slots=[1])
    assert not output.failed
    assert 1 not in output.numbers
    (deferred,) = engine.scheduler.snapshot().waiting
    assert (deferred.number, deferred.state) == (1, RequestState.WAITING)
    while engine.plans or engine.plan() is not None:
        engine.finish_step()
    assert [len(engine.tokens[0, number]) for number in range(3)] == [12, 0, 12], "others go on"
    clock.now += 1
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.tokens[0, number] == expected(number, prompt, 12)


def test_deferred_row_finds_its_blocks_in_the_cache() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(100), max_tokens=4))
    engine.plan()
    engine.finish_step(deferred_slots=[0])
    assert engine.plan() is None
    clock.now = engine.scheduler.next_due_at
    plan = engine.plan()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 96
    engine.run()


def test_pauses_grow_and_are_bounded() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock), steps_in_flight=1)
    prompt = make_prompt(10)
    engine.add(make_request(0, prompt, max_tokens=4))
    pauses = []
    assert engine.plan() is not None
    for _ in range(9):
        engine.finish_step(deferred_slots=[0])
        deferred_at = clock.now
        while engine.plan() is None:
            clock.now += 0.01
        pauses.append(round(clock.now - deferred_at, 2))
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5], abs=0.015)
    engine.run()
    assert engine.tokens[0, 0] == expected(0, prompt, 4)


def test_draining_row_may_be_deferred() -> None:
    clock = Clock()
    engine = Engine(
        make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs", clock=clock), steps_in_flight=2
    )
    prompts = [make_prompt(31, seed=0), make_prompt(30, seed=1)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=20))
    while not engine.scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    (draining,) = engine.scheduler.snapshot().draining
    num_known = len(engine.tokens[0, draining.number])
    engine.finish_step(deferred_slots=[draining.slot])
    assert engine.scheduler.snapshot().draining == ()
    assert len(engine.tokens[0, draining.number]) == num_known
    clock.now += 1
    engine.run()
    for number, prompt in enumerate(prompts):
        outputs, _, _ = naive_generation(prompt, number, SamplingParams(max_tokens=20), (), 64)
        assert engine.tokens[0, number] == outputs


@pytest.mark.parametrize("ends", ["abort", "worker lost"])
def test_deferred_request_may_end_or_lose_its_worker(ends: str) -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(10), max_tokens=4))
    engine.plan()
    engine.finish_step(deferred_slots=[0])
    if ends == "abort":
        engine.scheduler.requests.abort(0, 0)
        engine.scheduler.check_integrity()
        assert engine.scheduler.num_requests == 0
        return
    engine.scheduler.requeue_all()
    successor = make_scheduler(clock=clock)
    successor.adopt(engine.scheduler)
    successor.check_integrity()
    assert successor.schedule() is None
    clock.now += 1
    assert successor.schedule() is not None


def test_pauses_begin_anew_for_a_row_that_has_gone_on() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(10), max_tokens=8))

    def defer() -> float:
        assert engine.plan() is not None
        engine.finish_step(deferred_slots=[0])
        pause_s: float = engine.scheduler.next_due_at - clock.now
        clock.now = engine.scheduler.next_due_at
        return pause_s

    first, second = defer(), defer()
    assert second == pytest.approx(2 * first)
    for _ in range(3):
        engine.plan()
        engine.finish_step()
        clock.now += 1
    assert defer() == pytest.approx(first)
