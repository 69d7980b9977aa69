"""Rows that become vectors, beside rows that generate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.scheduling import (
    VOCAB_SIZE,
    Clock,
    Engine,
    NaiveWorker,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
    naive_vectors,
)
from triptych.errors import ConfigError, InvalidRequest, ProtocolViolation
from triptych.types.outputs import FinishReason
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowKey, StepResult
from triptych_services.enginecore.scheduler.step_results import Failed, Finished

LAST = PoolingParams(kind=PoolingKind.LAST)
MEAN = PoolingParams(kind=PoolingKind.MEAN)
EACH = PoolingParams(Task.TOKEN_EMBED, PoolingKind.LAST)


def check_vectors(engine: Engine, number: int, prompt: list[int], pooling: PoolingParams) -> None:
    outcome = engine.outcomes[0, number]
    assert isinstance(outcome, Finished)
    assert outcome.reason is FinishReason.STOP
    assert engine.tokens[0, number] == []
    np.testing.assert_array_equal(engine.vectors[0, number], naive_vectors(prompt, pooling))


@pytest.mark.parametrize("pooling", [LAST, MEAN, EACH, PoolingParams(Task.CLASSIFY)])
@pytest.mark.parametrize("budget", [8, 40, 64])
def test_a_prompt_is_pooled_in_chunks_or_whole(pooling: PoolingParams, budget: int) -> None:
    engine, prompt = Engine(make_scheduler(max_num_batched_tokens=budget, max_num_seqs=4)), make_prompt(37)
    engine.add(make_request(1, prompt, pooling=pooling))
    engine.run()
    check_vectors(engine, 1, prompt, pooling)


def test_pooled_rows_change_no_token_of_those_beside_them() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=32, max_num_seqs=4), steps_in_flight=3)
    prompts = {number: make_prompt(5 + 7 * number, number) for number in range(12)}
    for number, prompt in prompts.items():
        engine.add(make_request(number, prompt, pooling=MEAN if number % 2 else None, max_tokens=9))
    engine.run()
    for number, prompt in prompts.items():
        if number % 2:
            check_vectors(engine, number, prompt, MEAN)
        else:
            expected = naive_generation(prompt, number, SamplingParams(max_tokens=9), (), 2048)
            assert engine.end_of(number) == expected


def test_a_prompt_may_fill_the_whole_context() -> None:
    engine, prompt = Engine(make_scheduler(max_model_len=32, num_blocks=3)), make_prompt(32)
    engine.add(make_request(1, prompt, pooling=MEAN))
    engine.run()
    check_vectors(engine, 1, prompt, MEAN)
    with pytest.raises(InvalidRequest, match="33 tokens are above the limit"):
        engine.add(make_request(2, make_prompt(33), pooling=MEAN))


def test_only_the_last_state_can_be_had_from_the_cache() -> None:
    engine, prompt = Engine(make_scheduler()), make_prompt(64)
    engine.add(make_request(1, prompt, max_tokens=1))
    engine.run()
    for number, pooling in enumerate((MEAN, EACH, PoolingParams(), LAST), start=2):
        before = engine.worker.num_tokens_computed
        engine.add(make_request(number, prompt, pooling=pooling))
        engine.run()
        check_vectors(engine, number, prompt, pooling)
        assert engine.worker.num_tokens_computed - before == (1 if pooling is LAST else 64)


def test_the_kind_that_a_model_has_may_read_the_cache() -> None:
    engine, prompt = Engine(make_scheduler(last_state_tasks=("embed",))), make_prompt(64)
    engine.worker.pools_last = True
    engine.add(make_request(1, prompt, max_tokens=1))
    engine.run()
    by_cost = {
        1: (PoolingParams(), LAST),
        64: (MEAN, PoolingParams(Task.CLASSIFY), PoolingParams(Task.TOKEN_EMBED)),
    }
    number = 1
    for cost, kinds in by_cost.items():
        for pooling in kinds:
            number += 1
            before = engine.worker.num_tokens_computed
            engine.add(make_request(number, prompt, pooling=pooling))
            engine.run()
            check_vectors(engine, number, prompt, pooling)
            assert engine.worker.num_tokens_computed - before == cost, pooling


def test_a_pooled_row_makes_way_while_its_vectors_are_in_flight() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(*(make_request(number, make_prompt(20, number), pooling=MEAN) for number in range(3)))
    assert engine.plan() is not None
    second = engine.plan()
    assert second is not None
    assert len(second.new_rows) == 1, "the row is free for the next one before the vectors are there"
    engine.run()
    for number in range(3):
        check_vectors(engine, number, make_prompt(20, number), MEAN)


def test_what_ends_early_gets_no_vectors() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(1, make_prompt(20), pooling=MEAN), make_request(2, make_prompt(9), pooling=MEAN))
    engine.plan()
    finished = engine.scheduler.requests.abort(0, 1)
    assert finished is not None
    output = engine.finish_step()
    assert [request.number for request, _ in output.vectors] == [2]
    engine.run()


def test_a_lost_worker_and_a_late_one_cost_time_only() -> None:
    clock, prompt = Clock(), make_prompt(40)
    engine = Engine(make_scheduler(max_num_batched_tokens=16, max_num_seqs=4, clock=clock))
    engine.add(make_request(1, prompt, pooling=MEAN))
    engine.plan()
    engine.finish_step()
    engine.plan()
    engine.lose_worker()
    for _ in range(3):
        assert engine.plan() is not None
    engine.finish_step()
    engine.finish_step()
    engine.finish_step(deferred_slots=[0])
    assert (0, 1) not in engine.outcomes
    clock.now += 1
    engine.run()
    check_vectors(engine, 1, prompt, MEAN)


def test_a_failing_row_fails_by_itself() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(1, make_prompt(20), pooling=MEAN), make_request(2, make_prompt(9), pooling=MEAN))
    engine.plan()
    engine.finish_step(failing_slots=[0])
    assert isinstance(engine.outcomes[0, 1], Failed)
    engine.run()
    check_vectors(engine, 2, make_prompt(9), MEAN)


@pytest.mark.parametrize(
    ("vectors", "why"),
    [
        ({}, "slot 0 has 0 vectors, 1 are due"),
        ({RowKey(0, 0): np.ones((2, 4), np.float32)}, "slot 0 has 2 vectors, 1 are due"),
        (
            {RowKey(0, 0): np.ones((1, 4), np.float32), RowKey(1, 0): np.ones((1, 4), np.float32)},
            "slot 1 has vectors, and none are due",
        ),
    ],
)
def test_vectors_that_were_not_planned_are_refused(vectors: dict[RowKey, np.ndarray], why: str) -> None:
    scheduler = make_scheduler()
    scheduler.requests.add(make_request(1, make_prompt(8), pooling=MEAN))
    scheduler.requests.add(make_request(2, make_prompt(8)))
    plan = scheduler.schedule()
    assert plan is not None
    good = NaiveWorker().execute(plan)
    with pytest.raises(ProtocolViolation, match=why):
        scheduler.update(replace(good, vectors=vectors))
    scheduler.check_integrity()
    assert len(scheduler.update(good).vectors) == 1


def test_a_token_for_a_pooled_row_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.requests.add(make_request(1, make_prompt(8), pooling=MEAN))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ProtocolViolation, match="1 tokens, 0 were planned"):
        scheduler.update(
            StepResult(1, np.array([VOCAB_SIZE - 1], np.uint32), vectors=NaiveWorker().execute(plan).vectors)
        )


class TestEncoders:
    """Texts that are computed whole."""

    def test_texts_wait_for_a_step_that_holds_them(self) -> None:
        scheduler = make_scheduler(
            is_encoder=True,
            max_model_len=32,
            block_size=32,
            num_blocks=9,
            max_num_batched_tokens=40,
            max_num_seqs=8,
            long_prefill_token_threshold=16,
        )
        engine = Engine(scheduler, NaiveWorker(32))
        prompts = {number: make_prompt(length) for number, length in enumerate((30, 30, 5, 32, 8, 30))}
        for number, prompt in prompts.items():
            engine.add(make_request(number, prompt, pooling=MEAN))
        while scheduler.has_work:
            plan = engine.plan()
            assert plan is not None
            lengths = plan.chunk_lengths.tolist()
            assert lengths == [row.num_prompt_tokens for row in plan.new_rows]
            engine.finish_step()
        for number, prompt in prompts.items():
            check_vectors(engine, number, prompt, MEAN)

    def test_nothing_is_cached(self) -> None:
        scheduler = make_scheduler(
            is_encoder=True, max_model_len=32, block_size=16, max_num_batched_tokens=40
        )
        engine = Engine(scheduler)
        for number in range(2):
            engine.add(make_request(number, make_prompt(32), pooling=LAST))
            engine.run()
        assert engine.worker.num_tokens_computed == 64

    def test_a_step_must_hold_the_longest_text(self) -> None:
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens 16 is below max_model_len 32"):
            make_scheduler(is_encoder=True, max_model_len=32, max_num_batched_tokens=16, max_num_seqs=4)
