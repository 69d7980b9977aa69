"""Shares of a step that is too small for all."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.helpers.scheduling import (
    Engine,
    counts_by_number,
    find_cached_blocks,
    make_prompt,
    make_request,
    make_scheduler,
    row_counts,
)

BUDGET = 40


def make_engine(**config: object) -> Engine:
    return Engine(make_scheduler(max_num_batched_tokens=BUDGET, **config), steps_in_flight=1)


def add(engine: Engine, number: int, length: int, priority: int = 0, max_tokens: int = 4) -> None:
    engine.add(make_request(number, make_prompt(length, number), priority=priority, max_tokens=max_tokens))


def steps(engine: Engine, count: int) -> list[dict[int, int]]:
    plans = []
    for _ in range(count):
        plans.append(counts_by_number(engine.scheduler, engine.plan()))
        engine.finish_step()
    return plans


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_prompt_by_itself_takes_whole_steps(policy) -> None:
    engine = make_engine(policy=policy)
    add(engine, 0, 100)
    assert steps(engine, 4) == [{0: 40}, {0: 40}, {0: 20}, {0: 1}]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_prompt_goes_beside_a_long_one(policy) -> None:
    engine = make_engine(policy=policy)
    add(engine, 0, 300)
    steps(engine, 1)
    add(engine, 1, 10)
    add(engine, 2, 4)
    assert steps(engine, 3) == [{0: 30, 1: 10}, {0: 35, 1: 1, 2: 4}, {0: 38, 1: 1, 2: 1}]
    engine.run()


def test_an_urgent_prompt_overtakes_one_in_chunks() -> None:
    engine = make_engine()
    add(engine, 0, 300, priority=9)
    steps(engine, 1)
    add(engine, 1, 60, priority=-5)
    assert steps(engine, 4) == [{0: 30, 1: 10}, {1: 40}, {0: 30, 1: 10}, {0: 39, 1: 1}]
    engine.run()


def test_long_prompts_of_one_priority_follow_each_other() -> None:
    engine = make_engine()
    for number in range(3):
        add(engine, number, 100)
    assert steps(engine, 5) == [{0: 40}, {0: 30, 1: 10}, {0: 30, 2: 10}, {0: 1, 1: 39}, {0: 1, 1: 39}]
    engine.run()


def test_budget_that_is_left_goes_to_the_long_prompt() -> None:
    engine = make_engine(num_blocks=20, max_model_len=300)
    add(engine, 0, 270)
    steps(engine, 1)
    add(engine, 1, 100)  # there are no blocks for it
    assert steps(engine, 3) == [{0: 40}] * 3
    engine.run()


def test_a_prompt_in_chunks_does_not_stop_those_that_decode() -> None:
    engine = make_engine()
    add(engine, 0, 300, priority=-1, max_tokens=9)
    add(engine, 1, 10, max_tokens=9)
    assert steps(engine, 3) == [{0: 40}, {0: 30, 1: 10}, {0: 39, 1: 1}]
    engine.run()


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 2)), min_size=1, max_size=8
    ),
    budget=st.integers(8, 60),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_no_step_leaves_tokens_that_a_request_wants(arrivals, budget, policy) -> None:
    engine = Engine(
        make_scheduler(max_num_batched_tokens=budget, policy=policy, max_num_seqs=8), steps_in_flight=1
    )
    scheduler = engine.scheduler
    for number, (num_steps, length, priority) in enumerate(arrivals):
        add(engine, number, length, priority if policy == "priority" else 0)
        for _ in range(num_steps):
            running = scheduler.snapshot().running
            num_wanted = sum(row_counts(scheduler, request).wanted for request in running)
            num_wanted += sum(
                len(request.token_ids) - len(find_cached_blocks(scheduler, request)) * 16
                for request in scheduler.snapshot().waiting
            )
            if (plan := engine.plan()) is None:
                break
            assert plan.num_tokens == min(budget, num_wanted)
            engine.finish_step()
    engine.run()
