"""Requests that are passed over or held back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.scheduling import Engine, counts_by_number, make_prompt, make_request, make_scheduler
from triptych.types.pooling import PoolingParams
from triptych.types.step import StepResult
from triptych_services.enginecore.kv.manager import BlockManager


def add(engine: Engine, *lengths: int, first: int = 0, max_tokens: int = 4) -> None:
    for number, length in enumerate(lengths, first):
        engine.add(make_request(number, make_prompt(length, seed=number), max_tokens=max_tokens))


def steps(engine: Engine, count: int) -> list[dict[int, int]]:
    """Return the tokens of each of the next steps; each result is applied before the next plan."""
    plans = []
    for _ in range(count):
        plans.append(counts_by_number(engine.scheduler, engine.plan()))
        engine.finish_step()
    return plans


def test_short_prompts_pass_long_ones_over_the_limit() -> None:
    engine = Engine(make_scheduler(long_prefill_token_threshold=100, max_long_partial_prefills=1))
    add(engine, 300, 301, 20, 302, 30)
    assert steps(engine, 4) == [
        {0: 100, 2: 20, 4: 30},
        {0: 100, 2: 1, 4: 1},
        {0: 100, 1: 100, 2: 1, 4: 1},  # the first computes its last chunk
        {0: 1, 1: 100, 2: 1, 4: 1},
    ]
    engine.run()
    assert len(engine.outcomes) == 5


@pytest.mark.parametrize(("limit", "num_started"), [(0, 4), (1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_as_many_long_prompts_are_in_partial_prefill_as_allowed(limit: int, num_started: int) -> None:
    engine = Engine(make_scheduler(long_prefill_token_threshold=100, max_long_partial_prefills=limit))
    add(engine, 300, 301, 302, 303)
    assert steps(engine, 1) == [dict.fromkeys(range(num_started), 100)]


def test_a_prompt_as_long_as_the_threshold_is_short() -> None:
    engine = Engine(make_scheduler(long_prefill_token_threshold=100, max_long_partial_prefills=1))
    add(engine, 300, 101, 100)
    assert steps(engine, 1) == [{0: 100, 2: 100}]


def test_a_long_prompt_in_the_cache_does_not_count_as_long() -> None:
    engine = Engine(make_scheduler(long_prefill_token_threshold=100, max_long_partial_prefills=1))
    add(engine, 300)
    engine.run()
    engine.add(make_request(1, make_prompt(300, seed=0)), make_request(2, make_prompt(301, seed=2)))
    assert steps(engine, 1) == [{1: 12, 2: 100}]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    engine = Engine(
        make_scheduler(long_prefill_token_threshold=50, max_long_partial_prefills=1, max_num_seqs=3),
        steps_in_flight=1,
    )
    add(engine, 120, 121, max_tokens=1)
    for number in range(2, 40):
        add(engine, 10, first=number, max_tokens=2)
        engine.plan()
        engine.finish_step()
    assert (0, 1) in engine.outcomes


def test_a_restriction_admits_only_the_named_requests() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    add(engine, 11, 12, 13, 14, max_tokens=2)
    requests = {request.number: request for request in engine.scheduler.snapshot().requests}
    engine.scheduler.restrict([requests[1], requests[3]])
    add(engine, 15, first=4, max_tokens=2)
    assert steps(engine, 2) == [{1: 12, 3: 14}, {1: 1, 3: 1}]
    assert engine.plan() is None, "the others wait, new arrivals too"
    assert len(engine.scheduler.snapshot().waiting) == 3
    engine.scheduler.restrict([requests[2]])
    assert steps(engine, 1) == [{2: 13}]
    engine.scheduler.restrict(None)
    assert steps(engine, 1) == [{0: 11, 2: 1}]
    engine.run()
    assert len(engine.outcomes) == 5


def test_a_restriction_leaves_running_requests_alone() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    add(engine, 11, 12)
    engine.plan()
    engine.scheduler.restrict([])
    engine.run_while_it_can()
    assert list(engine.outcomes) == [(0, 0)]
    engine.scheduler.restrict(None)
    engine.run()
    assert list(engine.outcomes) == [(0, 0), (0, 1)]


def test_a_held_request_may_end_and_costs_no_share() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, enable_prefix_caching=False), steps_in_flight=1)
    for number in range(12):
        engine.add(make_request(number, make_prompt(10), tenant="ab"[number % 2], max_tokens=1))
    held = [request for request in engine.scheduler.snapshot().requests if request.head.tenant == "b"]
    engine.scheduler.restrict(
        [request for request in engine.scheduler.snapshot().requests if request.head.tenant == "a"]
    )
    steps(engine, 5)
    outcome = engine.scheduler.requests.abort(0, held[0].number)
    assert outcome is not None
    engine.note(outcome)
    engine.scheduler.check_integrity()
    engine.scheduler.restrict(None)
    engine.run()
    assert [number for _, number in engine.outcomes] == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 11, 10]


def test_a_restriction_outlives_the_worker() -> None:
    engine = Engine(make_scheduler())
    add(engine, 11, 12, 13)
    only = next(request for request in engine.scheduler.snapshot().requests if request.number == 1)
    engine.scheduler.restrict([only])
    successor = make_scheduler()
    successor.adopt(engine.scheduler)
    successor.check_integrity()
    assert counts_by_number(successor, successor.schedule()) == {1: 12}


def test_requests_in_flight_are_those_that_a_loss_interrupts() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs", max_num_seqs=3)
    engine = Engine(scheduler, steps_in_flight=2)
    add(engine, 31, 30, 40, max_tokens=20)
    assert scheduler.requests_in_flight() == {}
    while not scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    positions = {request.number: position for request, position in scheduler.requests_in_flight().items()}
    assert positions == {0: 34, 1: 32}, "one runs, one drains"
    while engine.plans:
        engine.finish_step()
    assert scheduler.requests_in_flight() == {}


def test_choices_of_a_long_prompt_enter_over_several_steps() -> None:
    """Each finds 4,000 blocks in the cache: what one step may look up is bounded."""
    scheduler = make_scheduler(
        num_blocks=20_001, block_size=4, max_model_len=17_000, max_num_batched_tokens=16_000
    )
    prompt = make_prompt(16_000)
    for number in range(8):
        scheduler.requests.add(make_request(number, prompt, max_tokens=100))
    num_entered = []
    while len(scheduler.snapshot().waiting):
        plan = scheduler.schedule()
        assert plan is not None
        num_entered.append(len(plan.new_rows))
        num_sampling = len(scheduler.snapshot().steps_in_flight[0].sampling_slots)
        scheduler.update(StepResult(plan.step_id, np.zeros(num_sampling, np.uint32)))
    assert num_entered == [1, 3, 3, 1]
    assert scheduler.counters.prefix_hits == 7 * 15_999


def test_a_request_is_looked_up_again_when_it_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    def counting(self: BlockManager, *arguments: Any) -> list[int]:
        nonlocal num_looks
        num_looks += 1
        return look_up(self, *arguments)

    look_up = BlockManager.get_computed_blocks
    monkeypatch.setattr(BlockManager, "get_computed_blocks", counting)
    engine = Engine(make_scheduler(num_blocks=21, max_model_len=320))
    engine.add(make_request(0, make_prompt(160, seed=0), max_tokens=60))
    engine.add(make_request(1, make_prompt(200, seed=1), max_tokens=4))
    engine.run()
    assert num_looks == 3, "each when it came first in line, and the second when the first had gone"


def test_the_limits_are_those_of_the_new_worker() -> None:
    engine = Engine(make_scheduler(max_num_seqs=8, max_num_batched_tokens=8))
    for number in range(2):  # the first takes all that texts get in a step
        engine.add(make_request(number, make_prompt(8), pooling=PoolingParams()))
    engine.plan()
    successor = make_scheduler(max_num_seqs=8, max_num_batched_tokens=8)
    assert successor.adopt(engine.scheduler) == ()
    engine = Engine(successor)
    engine.run()
    assert len(engine.outcomes) == 2


def test_more_adapters_run_at_a_worker_that_has_more_slots() -> None:
    engine = Engine(make_scheduler(max_adapters=1, max_num_seqs=8))
    for number, adapter in enumerate("abc"):
        engine.add(make_request(number, make_prompt(9, number), adapter_digest=adapter))
    engine.plan()
    successor = make_scheduler(max_adapters=2, max_num_seqs=8)
    assert successor.adopt(engine.scheduler) == ()
    successor.schedule()
    successor.check_integrity()
    assert len(successor.snapshot().running) == 2
