"""Too few blocks: which requests are preempted, and that their tokens stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers.scheduling import (
    EOS,
    Engine,
    counts_by_number,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from tools.replay.plan_difference import is_same
from triptych.errors import ProtocolViolation
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, StepResult
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.planner import StepPlanner
from triptych_services.enginecore.scheduler.running_rows import Ints, RunningRows, Slots


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("is_caching", [True, False])
def test_few_blocks_yield_the_same_tokens_as_many(
    steps_in_flight: int, policy: str, is_chunked: bool, is_caching: bool
) -> None:
    scheduler = make_scheduler(
        num_blocks=14,
        max_model_len=200,
        eos_token_ids=(EOS,),
        policy=policy,
        max_num_seqs=6,
        max_num_batched_tokens=48 if is_chunked else 200,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=is_caching,
    )
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    cases = {}
    for number in range(12):
        prompt = make_prompt(1 + 11 * number % 60, seed=number % 4)
        sampling = SamplingParams(max_tokens=30 + number, ignore_eos=number % 3 > 0)
        cases[number] = prompt, sampling
        priority = number % 3 if policy == "priority" else 0
        engine.add(
            make_request(
                number,
                prompt,
                priority=priority,
                max_tokens=sampling.max_tokens,
                ignore_eos=sampling.ignore_eos,
            )
        )
    engine.run()
    assert scheduler.counters.num_preemptions > 0
    for number, (prompt, sampling) in cases.items():
        expected = naive_generation(prompt, number, sampling, (EOS,), 200)
        assert engine.end_of(number) == expected
    assert scheduler.snapshot().num_used_blocks == 0


def crowded(policy: str, priorities: tuple[int, ...], *, steps_in_flight: int = 1) -> Engine:
    """Three requests fill six blocks to the last position but one; none is left to grow into."""
    engine = Engine(
        make_scheduler(num_blocks=7, max_model_len=96, policy=policy), steps_in_flight=steps_in_flight
    )
    for number, priority in enumerate(priorities):
        engine.add(make_request(number, make_prompt(31, seed=number), priority=priority, max_tokens=40))
    for _ in range(2):
        engine.plan()
        engine.finish_step()
    return engine


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"),
    [("fcfs", (0, 0, 0), 2), ("priority", (5, 0, 1), 0), ("priority", (1, 5, 5), 2)],
)
def test_the_last_or_least_urgent_is_preempted(policy: str, priorities: tuple[int, ...], victim: int) -> None:
    engine = crowded(policy, priorities)
    engine.add(make_request(9, make_prompt(1)))
    (victims_slot,) = (r.slot for r in engine.scheduler.snapshot().running if r.number == victim)
    plan = engine.plan()
    assert plan is not None
    others = {0, 1, 2} - {victim}
    assert counts_by_number(engine.scheduler, plan) == dict.fromkeys(others, 1)
    assert plan.removed_slots.tolist() == [victims_slot]
    assert plan.new_rows == ()
    assert engine.scheduler.counters.num_preemptions == 1
    engine.run()


def test_none_is_admitted_in_a_step_that_preempted() -> None:
    engine = Engine(make_scheduler(num_blocks=7, max_model_len=96), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(31, seed=0), priority=0, max_tokens=9))
    engine.add(make_request(1, make_prompt(62, seed=1), priority=5, max_tokens=9))
    for _ in range(2):
        engine.plan()
        engine.finish_step()
    engine.add(make_request(2, make_prompt(1), priority=1, max_tokens=9))
    steps = []
    for _ in range(2):
        plan = engine.plan()
        assert plan is not None
        steps.append(counts_by_number(engine.scheduler, plan))
        engine.finish_step()
    assert steps == [{0: 1}, {0: 1, 2: 1}]
    engine.run()


def test_a_victim_refunds_its_tokens_to_those_who_stay() -> None:
    scheduler = make_scheduler(num_blocks=14, max_model_len=180, max_num_batched_tokens=40)
    engine = Engine(scheduler, steps_in_flight=1)
    engine.add(make_request(0, make_prompt(95, seed=0), priority=9, max_tokens=20))
    steps = []
    for step in range(5):
        if step == 2:
            engine.add(make_request(1, make_prompt(110, seed=1), priority=0, max_tokens=20))
        plan = engine.plan()
        assert plan is not None
        steps.append(counts_by_number(scheduler, plan))
        engine.finish_step()
    # In the last step both need another block and one is free: the less urgent would have had 1 of 40 tokens.
    assert steps == [{0: 40}, {0: 40}, {0: 15, 1: 25}, {0: 1, 1: 39}, {1: 40}]
    engine.run()
    assert len(engine.outcomes) == 2


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_a_preempted_request_waits_for_its_results(
    steps_in_flight: int,
) -> None:
    engine = Engine(
        make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs"), steps_in_flight=steps_in_flight
    )
    engine.add(make_request(0, make_prompt(31, seed=0), max_tokens=20))
    engine.add(make_request(1, make_prompt(30, seed=1), max_tokens=20))
    for _ in range(steps_in_flight):
        engine.plan()
    while not engine.scheduler.counters.num_preemptions:
        engine.finish_step()
        engine.plan()
    (draining,) = engine.scheduler.snapshot().draining
    assert draining.number == 1
    num_known, expected = len(engine.tokens[0, 1]), draining.num_in_flight
    assert expected == steps_in_flight - 1
    for _ in range(expected):
        assert engine.scheduler.snapshot().draining == (draining,)
        engine.finish_step()
    assert len(engine.tokens[0, 1]) == num_known + expected
    snapshot = engine.scheduler.snapshot()
    assert (snapshot.draining, snapshot.waiting) == ((), (draining,))
    assert list(draining.token_ids) == make_prompt(30, seed=1) + engine.tokens[0, 1]
    engine.run()
    outputs, _, _ = naive_generation(make_prompt(30, seed=1), 1, SamplingParams(max_tokens=20), (), 64)
    assert engine.tokens[0, 1] == outputs


def test_a_preempted_request_may_end_by_a_late_token() -> None:
    engine = Engine(make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs"), steps_in_flight=2)
    engine.add(make_request(0, make_prompt(31, seed=0), max_tokens=20))
    engine.add(make_request(1, make_prompt(30, seed=1), max_tokens=2))
    while not engine.scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    (draining,) = engine.scheduler.snapshot().draining
    assert len(draining.token_ids) == 30 + 1
    engine.finish_step()
    assert engine.outcomes[0, 1].request is draining
    assert len(engine.scheduler.snapshot().waiting) == 0
    engine.run()
    assert [len(engine.tokens[0, number]) for number in (0, 1)] == [20, 2]


def test_a_preempted_request_reports_its_first_hits() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=112, policy="fcfs")
    engine = Engine(scheduler, steps_in_flight=1)
    engine.add(make_request(0, make_prompt(31, seed=0), max_tokens=18))
    engine.add(make_request(1, make_prompt(62, seed=1), max_tokens=20))
    rows: list[NewRow] = []
    while engine.plan() is not None:
        rows += engine.plans[-1].new_rows
        engine.finish_step()
    again = rows[-1]
    assert scheduler.counters.num_preemptions == 1
    assert again.num_prompt_tokens == 62
    assert again.num_computed_tokens >= 48, "its own blocks were still there"
    assert engine.outcomes[0, 1].request.num_cached_tokens == 0
    assert scheduler.counters.prefix_hits == 0
    needed = (31 + 17) + (62 + 19)
    recomputed = len(again.token_ids) - again.num_computed_tokens
    assert scheduler.counters.num_scheduled_tokens == needed + recomputed - 1


def test_a_prompt_is_admitted_only_when_all_of_it_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=11, max_model_len=160, max_num_batched_tokens=32)
    engine = Engine(scheduler, steps_in_flight=1)
    engine.add(make_request(0, make_prompt(100, seed=0), max_tokens=2))
    engine.add(make_request(1, make_prompt(110, seed=1), max_tokens=2))
    for _ in range(3):  # 32, 64, 96 tokens of the first: from 2 to 6 blocks
        engine.plan()
        engine.finish_step()
        assert len(scheduler.snapshot().running) == 1, "its first chunk alone would fit, but not its whole"
    engine.run()
    assert len(engine.outcomes) == 2
    assert scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("threshold", [0, 128, 256])
def test_prompts_in_chunks_never_evict_each_other(threshold: int, is_caching: bool) -> None:
    """Blocks that running prompts still need are not free for others."""
    scheduler = make_scheduler(
        num_blocks=201,
        max_model_len=1600,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=is_caching,
        max_num_batched_tokens=1000,
    )
    for number in range(8):
        scheduler.requests.add(make_request(number, make_prompt(1500, number), max_tokens=4))
    most_running = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        most_running = max(most_running, len(scheduler.snapshot().running))
        num_sampling = len(scheduler.snapshot().steps_in_flight[0].sampling_slots)
        scheduler.update(StepResult(plan.step_id, np.zeros(num_sampling, np.uint32)))
    assert most_running == 2
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.counters.num_scheduled_tokens == 8 * 1503


def test_the_waiting_never_make_the_running_give_way() -> None:
    engine = crowded("priority", (5, 5, 5))
    engine.add(make_request(9, make_prompt(20, seed=9), priority=-1))
    running = len(engine.scheduler.snapshot().running)
    engine.plan()  # preempts for the running themselves
    engine.finish_step()
    assert len(engine.scheduler.snapshot().running) < running
    assert engine.scheduler.counters.num_preemptions == 1
    engine.run()
    assert len(engine.outcomes) == 4


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
@pytest.mark.parametrize("num_lost", [0, 3, 7])
def test_every_prompt_token_is_reported_once(steps_in_flight: int, num_lost: int) -> None:
    scheduler = make_scheduler(
        num_blocks=14,
        max_model_len=200,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=9,
    )
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    for number in range(12):
        prompt = make_prompt(1 + 11 * number % 60, seed=number % 4)
        asked = {"prompt_logprobs": 1} if number % 3 else {}
        engine.add(make_request(number, prompt, max_tokens=30, ignore_eos=True, **asked))
    for _ in range(num_lost):
        for _ in range(steps_in_flight):
            engine.plan()
        if engine.plans:
            engine.finish_step()
        engine.lose_worker()
    engine.run()  # which compares what was reported with the prompt at each end
    assert scheduler.counters.num_preemptions > 0
    assert all(engine.prompt_logprobs[0, number] for number in (1, 2, 4, 5, 7, 8, 10, 11))


def test_a_reported_prompt_is_read_from_the_cache() -> None:
    engine = Engine(make_scheduler(num_blocks=7, max_model_len=96, policy="fcfs"), steps_in_flight=1)
    for number in range(3):
        engine.add(make_request(number, make_prompt(31, seed=number), prompt_logprobs=1, max_tokens=40))
    rows: list[NewRow] = []
    while len(engine.outcomes) < 3:
        plan = engine.plan()
        assert plan is not None
        rows += plan.new_rows
        engine.finish_step()
    assert [row.prompt_logprobs_start for row in rows[:3]] == [0, 0, 0]
    returned = rows[3:]
    assert {row.prompt_logprobs_start for row in returned} == {31}
    assert any(row.num_computed_tokens > 0 for row in returned)


@pytest.mark.parametrize("changes", [{"first_position": 1}, {"first_position": 8}])
def test_a_part_of_a_prompt_that_is_not_due_breaks_the_protocol(changes: dict[str, int]) -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=6), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(20), prompt_logprobs=0))
    engine.plan()
    engine.finish_step()
    engine.plan()
    result = engine.worker.execute(engine.plans.popleft())
    ((row, part),) = result.prompt_logprobs.items()
    assert part.first_position == 7
    wrong = replace(part, **changes)
    with pytest.raises(ProtocolViolation, match="position 7 is due"):
        engine.scheduler.update(replace(result, prompt_logprobs={row: wrong}))
    assert engine.scheduler.update(result).prompt_logprobs, "nothing has changed before"


class OneAtATime(StepPlanner):
    """Looks again after each preemption."""

    def choose_victims(
        self, candidates: Sequence[Request], slot_to_need: Mapping[int, int], num_lacking: int
    ) -> list[Request]:
        return [candidates[-1]]


PLANNER = "triptych_services.enginecore.scheduler.scheduler.StepPlanner"


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 39), st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=14
    ),
    num_blocks=st.integers(12, 40),
    budget=st.integers(14, 100),
    policy=st.sampled_from(["fcfs", "priority"]),
    is_caching=st.booleans(),
)
def test_victims_together_are_those_of_one_at_a_time(prompts, num_blocks, budget, policy, is_caching) -> None:
    schedulers = []
    for planner in (StepPlanner, OneAtATime):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PLANNER, planner)
            schedulers.append(
                make_scheduler(
                    num_blocks=num_blocks,
                    block_size=4,
                    max_model_len=44,
                    policy=policy,
                    max_num_seqs=14,
                    max_num_batched_tokens=budget,
                    enable_prefix_caching=is_caching,
                )
            )
    for number, (length, seed, priority) in enumerate(prompts):
        for scheduler in schedulers:
            priority = priority if policy == "priority" else 0
            scheduler.requests.add(
                make_request(number, make_prompt(length, seed), priority=priority, max_tokens=40 - length)
            )
    while schedulers[0].has_work:
        plans = [scheduler.schedule() for scheduler in schedulers]
        assert is_same(*plans)
        assert plans[0] is not None
        step = schedulers[0].snapshot().steps_in_flight[0]
        token_ids = np.arange(len(step.sampling_slots), dtype=np.uint32)
        for scheduler in schedulers:
            scheduler.update(StepResult(plans[0].step_id, token_ids))
    assert schedulers[0].counters.num_preemptions == schedulers[1].counters.num_preemptions


def test_many_victims_are_chosen_in_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows cross into a new block at once, and none is free."""
    num_looks = 0
    look = RunningRows.wanted

    def counting(rows: RunningRows, slots: Slots) -> Ints:
        nonlocal num_looks
        num_looks += 1
        return look(rows, slots)

    scheduler = make_scheduler(num_blocks=101, max_model_len=64, max_num_seqs=100, max_num_waiting=100)
    for number in range(100):
        scheduler.requests.add(make_request(number, make_prompt(15, number), max_tokens=40))
    scheduler.schedule()
    scheduler.schedule()
    monkeypatch.setattr(RunningRows, "wanted", counting)
    scheduler.schedule()
    assert scheduler.counters.num_preemptions == 50
    assert num_looks == 2
