"""Choices of one request compute their prompt once, however many steps it takes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.enginecore.scheduler.test_request_groups import make_choices
from tests.helpers.scheduling import (
    BLOCK_SIZE,
    Engine,
    NaiveWorker,
    make_prompt,
    make_scheduler,
    naive_generation,
)
from triptych.types.sampling import SamplingParams

LIMITS = [
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64},
    {"max_num_batched_tokens": 128, "max_num_seqs": 3},
    {},
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_prompt_is_computed_once(limits: dict[str, int], enable_prefix_caching: bool) -> None:
    """Except for its last block, which is not full: its KV cannot be shared."""
    length, num_choices = 1000, 5
    engine = Engine(make_scheduler(enable_prefix_caching=enable_prefix_caching, **limits))
    engine.add_choices(*make_choices(range(num_choices), make_prompt(length), sampling={"max_tokens": 1}))
    engine.run()
    assert len(engine.outcomes) == num_choices
    assert engine.worker.num_tokens_computed == length + (num_choices - 1) * (length % BLOCK_SIZE)


def test_another_choice_computes_the_prompt_when_the_first_one_leaves() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=256))
    engine.add_choices(*make_choices(range(4), make_prompt(1000)))
    for _ in range(2):
        engine.plan()
        engine.finish_step()
    engine.scheduler.requests.abort(0, 0)
    engine.scheduler.requests.abort(0, 2)
    engine.scheduler.check_integrity()
    engine.run()
    assert {number for _, number in engine.tokens if len(engine.tokens[0, number]) == 4} == {1, 3}


def test_nobody_waits_for_a_choice_that_may_not_run() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=256))
    choices = make_choices(range(3), make_prompt(1000))
    engine.add_choices(*choices)
    engine.scheduler.restrict(choices[1:])
    plan = engine.plan()
    assert plan is not None
    assert plan.num_tokens == 256


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 120),
    num_choices=st.integers(1, 6),
    block_size=st.integers(1, 8),
    budget=st.integers(6, 60),
    steps_in_flight=st.integers(1, 4),
    enable_prefix_caching=st.booleans(),
    aborted=st.sets(st.integers(0, 5), max_size=3),
    abort_at=st.integers(0, 8),
    lose_at=st.none() | st.integers(1, 12),
)
def test_streams_are_those_of_requests_alone(
    length: int,
    num_choices: int,
    block_size: int,
    budget: int,
    steps_in_flight: int,
    enable_prefix_caching: bool,
    aborted: set[int],
    abort_at: int,
    lose_at: int | None,
) -> None:
    scheduler = make_scheduler(
        block_size=block_size,
        num_blocks=1 + -(-130 // block_size) * 2,
        max_model_len=130,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    engine.worker = NaiveWorker(block_size)
    prompt = make_prompt(length)
    engine.add_choices(*make_choices(range(num_choices), prompt))
    for step in range(max(abort_at, lose_at or 0)):
        if engine.plan() is not None:
            engine.finish_step()
        if step == abort_at:
            for number in aborted:
                scheduler.requests.abort(0, number)
            scheduler.check_integrity()
        if step == lose_at:
            engine.lose_worker()
    engine.run()
    for number in set(range(num_choices)) - aborted:
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=4), (), 130)
        assert engine.end_of(number) == expected
    assert scheduler.snapshot().num_used_blocks == 0
