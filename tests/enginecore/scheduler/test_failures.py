"""A worker that fails a row, or is lost altogether."""

from __future__ import annotations

import pytest

from tests.helpers.scheduling import (
    EOS,
    Engine,
    NaiveWorker,
    counts_by_number,
    find_cached_blocks,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
    row_counts,
)
from triptych.errors import EngineFailure, FieldViolation, InvalidRequest
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.request import RequestState


def expect_oracle(engine: Engine, number: int, prompt: list[int], max_tokens: int) -> None:
    expected = naive_generation(prompt, number, SamplingParams(max_tokens=max_tokens), (), 2048)
    assert engine.tokens[0, number] == expected[0], f"request {number}"


def test_a_failed_row_ends_that_request_alone() -> None:
    engine = Engine(make_scheduler())
    prompts = [make_prompt(9, seed=number) for number in range(3)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=8))
    engine.plan()
    engine.plan()
    output = engine.finish_step(failing_slots=[1])
    (failed,) = output.failed
    assert failed.request.number == 1
    assert isinstance(failed.error, EngineFailure)
    assert "step 1: made to fail" in failed.error.message
    assert output.numbers.tolist() == [0, 2]
    assert output.rows.tolist() == [0, 1], "tokens in the result: a failed row has none"
    engine.run()
    assert engine.tokens[0, 1] == []
    expect_oracle(engine, 0, prompts[0], 8)
    expect_oracle(engine, 2, prompts[2], 8)
    assert engine.scheduler.counters.num_finished == {
        "stop": 0,
        "length": 2,
        "repetition": 0,
        "abort": 0,
        "error": 1,
    }


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_no_row_reads_what_a_failed_row_should_write(steps_in_flight: int) -> None:
    engine = Engine(make_scheduler(), steps_in_flight=steps_in_flight)
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt, max_tokens=8), make_request(1, prompt, max_tokens=8))
    plan = engine.plan()
    assert plan is not None
    assert counts_by_number(engine.scheduler, plan) == {0: 100, 1: 4}, "the second reads the first's blocks"
    if steps_in_flight > 1:
        engine.add(make_request(2, prompt, max_tokens=8))
        engine.plan()
    if steps_in_flight > 2:
        engine.scheduler.requests.abort(0, 2)
        engine.plan()
    output = engine.finish_step(failing_slots=[0])
    assert [failed.request.number for failed in output.failed] == [0]
    assert len(output.token_ids) == 0, "the second's token came of garbage"
    engine.add(make_request(3, prompt, max_tokens=8))
    engine.run()
    survivors = {1: (1, 3), 2: (1, 2, 3), 3: (1, 3)}[steps_in_flight]
    for number in survivors:
        expect_oracle(engine, number, prompt, 8)
    assert engine.scheduler.snapshot().num_used_blocks == 0


def test_a_failed_row_takes_back_what_its_earlier_steps_wrote() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=64), steps_in_flight=1)
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt, max_tokens=8))
    engine.plan()
    engine.finish_step(spoiled_slots=[0])
    engine.add(make_request(1, prompt, max_tokens=8))  # hits what the first has spoiled
    plan = engine.plan()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 96
    engine.finish_step(failing_slots=[0])
    engine.add(make_request(2, prompt, max_tokens=8))
    engine.run()
    for number in (1, 2):
        expect_oracle(engine, number, prompt, 8)


def test_a_draining_row_that_fails_uncaches_what_it_wrote() -> None:
    engine = Engine(make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs"), steps_in_flight=2)
    prompts = [make_prompt(31, seed=0), make_prompt(30, seed=1)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=20))
    while not engine.scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    (draining,) = engine.scheduler.snapshot().draining
    assert find_cached_blocks(engine.scheduler, draining)
    engine.finish_step(failing_slots=[draining.slot])
    assert draining.state is RequestState.ENDED
    assert not find_cached_blocks(engine.scheduler, draining)
    engine.run()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_hits_of_two_failed_requests_are_uncached(num_failures: int) -> None:
    engine = Engine(make_scheduler(), steps_in_flight=1)
    shared = make_prompt(64)
    engine.add(make_request(0, shared, max_tokens=1))
    engine.run()
    for number in range(1, num_failures + 1):
        engine.add(make_request(number, [*shared, *make_prompt(20, seed=number)], max_tokens=8))
        engine.plan()
        engine.finish_step(failing_slots=[0])
    engine.add(make_request(9, [*shared, 1], max_tokens=8))
    expected = {1: 1, 2: 65}[num_failures]
    assert counts_by_number(engine.scheduler, engine.plan()) == {9: expected}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_clients_mistake_makes_no_other_request_start_over(steps_in_flight: int) -> None:
    prompt = make_prompt(100)
    computed = []
    for refused in ((), (3,)):
        engine = Engine(make_scheduler(max_num_batched_tokens=512), steps_in_flight=steps_in_flight)
        for number in range(8):
            engine.add(make_request(number, [*prompt, number], max_tokens=8 if number != 3 else 1))
        for _ in range(steps_in_flight):
            engine.plan()
        output = engine.finish_step(refused_slots=refused)
        engine.run()
        computed.append(engine.worker.num_tokens_computed)
        for number in {*range(8)} - {3}:
            expect_oracle(engine, number, [*prompt, number], 8)
    (failed,) = output.failed
    assert failed.request.number == 3
    assert isinstance(failed.error, InvalidRequest)
    assert failed.error.violations[0] == FieldViolation("sampling", "made to be refused")
    assert computed[0] == computed[1]


def test_what_was_computed_from_a_failed_block_is_uncached() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(128)
    engine.add(make_request(0, prompt[:100], max_tokens=8))
    engine.plan()
    engine.add(make_request(1, prompt, max_tokens=8))  # reads six blocks of the first, fills two more
    plan = engine.plan()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 96
    engine.finish_step(failing_slots=[0])
    engine.run()
    engine.add(make_request(2, prompt, max_tokens=8))
    engine.run()
    expect_oracle(engine, 1, prompt, 8)
    expect_oracle(engine, 2, prompt, 8)


def test_a_block_that_a_failed_step_was_to_fill_is_uncached() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(15)
    engine.add(make_request(0, prompt, max_tokens=8))
    engine.plan()
    engine.plan()  # computes position 15, the block's last
    engine.finish_step()
    longer = [*prompt, *engine.tokens[0, 0], 1]
    assert len(longer) == 17
    engine.finish_step(failing_slots=[0])
    engine.add(make_request(1, longer, max_tokens=8))
    assert counts_by_number(engine.scheduler, engine.plan()) == {1: 17}
    engine.run()
    expect_oracle(engine, 1, longer, 8)


def test_a_request_that_hit_a_failed_row_starts_over() -> None:
    scheduler = make_scheduler(block_size=4, long_prefill_token_threshold=3)
    engine = Engine(scheduler, NaiveWorker(block_size=4))
    prompt = make_prompt(30)
    engine.add(make_request(0, prompt[:20], max_tokens=8))
    engine.plan()
    engine.add(make_request(1, prompt, max_tokens=8))
    for _ in range(4):  # the first fills its first block, the second reads it and gets to position 16
        engine.plan()
    assert [row_counts(scheduler, request).computed for request in scheduler.snapshot().running] == [15, 16]
    engine.finish_step()
    engine.finish_step(failing_slots=[0])
    assert len(scheduler.snapshot().running) == 0
    engine.run()
    engine.add(make_request(2, prompt, max_tokens=8))
    engine.run()
    expect_oracle(engine, 1, prompt, 8)
    expect_oracle(engine, 2, prompt, 8)


def test_a_draining_request_drops_tokens_of_a_failed_row() -> None:
    engine = Engine(make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs"))
    prompt = make_prompt(48)
    engine.add(make_request(0, prompt, max_tokens=8))
    engine.add(make_request(1, [*prompt, 1, 2], max_tokens=8))
    engine.plan()
    engine.plan()  # the first needs a fourth block, the second has the last one
    (draining,) = engine.scheduler.snapshot().draining
    assert (draining.number, draining.num_in_flight) == (1, 1)
    engine.finish_step(failing_slots=[0])
    assert engine.tokens[0, 1] == []
    engine.run()
    expect_oracle(engine, 1, [*prompt, 1, 2], 8)


def test_a_draining_request_may_fail() -> None:
    engine = Engine(make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs"))
    engine.add(make_request(0, make_prompt(31, seed=0), max_tokens=20))
    engine.add(make_request(1, make_prompt(30, seed=1), max_tokens=20))
    while not engine.scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    (draining,) = engine.scheduler.snapshot().draining
    output = engine.finish_step(failing_slots=[draining.slot])
    assert [failed.request for failed in output.failed] == [draining]
    engine.run()
    expect_oracle(engine, 0, make_prompt(31, seed=0), 20)


def test_an_error_for_a_request_that_has_ended_is_dropped() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(0, make_prompt(9), max_tokens=8))
    engine.plan()
    outcome = engine.scheduler.requests.abort(0, 0)
    assert outcome is not None
    engine.note(outcome)
    engine.add(make_request(1, make_prompt(8), max_tokens=4))  # takes the slot over
    engine.plan()
    output = engine.finish_step(failing_slots=[0])
    assert output.failed == ()
    engine.run()
    expect_oracle(engine, 1, make_prompt(8), 4)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [14, 200])
def test_a_lost_worker_costs_no_token_and_repeats_none(steps_in_flight: int, num_blocks: int) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_model_len=200,
        eos_token_ids=(EOS,),
        max_num_seqs=6,
        max_num_batched_tokens=48,
    )
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    prompts = [make_prompt(1 + 7 * number, seed=number % 3) for number in range(12)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=25))
    for losses in range(1, 6):
        for _ in range(9 * losses):
            while len(engine.plans) < steps_in_flight and engine.plan() is not None:
                pass
            if engine.plans:
                engine.finish_step()
        engine.lose_worker()
        assert (len(scheduler.snapshot().running), scheduler.num_in_flight) == (0, 0)
        assert (scheduler.snapshot().num_used_blocks, scheduler.snapshot().num_cached_blocks) == (0, 0)
    engine.run()
    for number, prompt in enumerate(prompts):
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=25), (EOS,), 200)
        assert engine.tokens[0, number] == expected[0]


def test_after_a_loss_plans_start_anew() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(0, make_prompt(20), max_tokens=8), make_request(1, make_prompt(20), max_tokens=8))
    engine.plan()
    engine.plan()
    engine.finish_step()
    engine.scheduler.requests.abort(0, 1)
    engine.lose_worker()
    plan = engine.plan()
    assert plan is not None
    assert (plan.step_id, plan.last_result_seen, plan.removed_slots.tolist()) == (1, 0, [])
    (row,) = plan.new_rows
    assert row.num_prompt_tokens == 20
    assert row.token_ids.tolist() == make_prompt(20) + engine.tokens[0, 0]
    assert row.num_computed_tokens == 0, "nothing is cached on the new worker"


def test_a_cache_reset_is_refused_while_anything_runs() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(64)
    engine.add(make_request(0, prompt, max_tokens=2))
    engine.plan()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.snapshot().num_cached_blocks == 4
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.snapshot().num_cached_blocks == 0
    engine.add(make_request(1, prompt, max_tokens=2))
    assert counts_by_number(engine.scheduler, engine.plan()) == {1: 64}


def test_a_smaller_worker_takes_over_all_that_fit() -> None:
    engine = Engine(make_scheduler(max_model_len=200, max_num_seqs=3))
    prompts = [make_prompt(length, seed=length) for length in (20, 90, 30, 40)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, deadline=1e6, max_tokens=12))
    for _ in range(3):
        engine.plan()
        engine.finish_step()
    previous = engine.scheduler
    engine.scheduler, engine.worker = make_scheduler(num_blocks=5, max_model_len=64), NaiveWorker()
    (failed,) = engine.scheduler.adopt(previous)
    engine.note(failed)
    engine.scheduler.check_integrity()
    assert failed.request.number == 1
    assert isinstance(failed.error, EngineFailure)
    assert engine.scheduler.counters.num_steps == 3, "counts go on"
    engine.run()
    for number in (0, 2, 3):
        expect_oracle(engine, number, prompts[number], 12)


def test_requests_of_a_lost_worker_can_be_failed() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    for number in range(3):
        engine.add(make_request(number, make_prompt(20, seed=number), max_tokens=8))
    engine.plan()
    interrupted = engine.scheduler.requests_in_flight()
    assert [request.number for request in interrupted] == [0, 1]
    failed = [
        engine.scheduler.requests.fail(request, EngineFailure("the worker was lost"))
        for request in interrupted
    ]
    for outcome in failed:
        engine.note(outcome)
    engine.lose_worker()
    engine.run()
    expect_oracle(engine, 2, make_prompt(20, seed=2), 8)
