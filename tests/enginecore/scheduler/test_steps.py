"""Plans and results: columns, overlap, stopping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.enginecore.scheduler.test_groups import FULL, MIXTURES, layout_for_one
from tests.helpers.journals import RecordedRun, replayed
from tests.helpers.scheduling import (
    EOS,
    Clock,
    Engine,
    NaiveWorker,
    counts_by_number,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from triptych.errors import ProtocolViolation
from triptych.types.facts import KvGroup
from triptych.types.outputs import FinishReason, StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult
from triptych_services.enginecore.kv.groups import longest_step
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.planner import StepPlanner
from triptych_services.enginecore.scheduler.running_rows import WatchedTokens
from triptych_services.enginecore.scheduler.step_builder import StepBuilder


def result(step_id: int, *token_ids: int) -> StepResult:
    return StepResult(step_id, np.array(token_ids, np.uint32))


class Untouchable(Request):
    """A request while it must not be looked at."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a request is read by a step in which nothing happens to it")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_decode_step_lists_nothing_and_touches_no_request(steps_in_flight: int) -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    for number in range(5):
        engine.add(make_request(number, make_prompt(18, seed=number), stop_token_ids=(200,), max_tokens=99))
    for _ in range(steps_in_flight):
        engine.plan()
    engine.finish_step()
    running = scheduler.snapshot().running
    for request in running:
        request.__class__ = Untouchable
    for _ in range(8):  # positions 19..26: no block ends, no request stops
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.num_tokens == 5
        columns = (plan.removed_slots, plan.chunk_slots, plan.skipped_slots, plan.block_slots, plan.block_ids)
        assert all(len(column) == 0 for column in columns)
        assert plan.new_rows == ()
        engine.plans.append(plan)
        output = scheduler.update(engine.worker.execute(engine.plans.popleft()))
        assert output.numbers.tolist() == [0, 1, 2, 3, 4]
    for request in running:
        object.__setattr__(request, "__class__", Request)
    scheduler.check_integrity()


@pytest.mark.parametrize("groups", [(FULL,), MIXTURES["windows"], MIXTURES["states"], MIXTURES["all_kinds"]])
def test_decode_steps_are_planned_as_any_step_is(
    groups: tuple[KvGroup, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that plans decode steps by themselves has the plans of one that does not know them; blocks run out."""
    builds: list[StepBuilder | None] = []
    plan_decode = StepPlanner.plan_decode

    def noting(planner: StepPlanner) -> StepBuilder | None:
        builds.append(plan_decode(planner))
        return builds[-1]

    monkeypatch.setattr(StepPlanner, "plan_decode", noting)
    random = Random(1)
    kv = layout_for_one(groups, 80, longest_step(16, 4, 1), spare=12, spare_states=3)
    run = RecordedRun(tmp_path, max_num_seqs=6, max_num_batched_tokens=16, kv=kv).start()
    for number in range(25):
        sampling = {"max_tokens": random.randint(1, 40), "ignore_eos": number % 3 == 0}
        run.submit(make_prompt(random.randint(1, 30), random.randint(0, 3)), sampling=sampling)
        for _ in range(random.randint(0, 4)):
            while len(run.plans) < 2 and run.plan():
                pass
            run.finish_step()
    run.run().engine.close()
    num_growing = sum(build is not None and len(build.block_ids) > 0 for build in builds)
    assert num_growing > 20
    assert sum(build is not None and not build.is_decode for build in builds) > 10
    assert builds.count(None) > 5
    assert run.engine.scheduler.counters.num_preemptions > 0
    monkeypatch.setattr(StepPlanner, "plan_decode", lambda planner: None)
    assert replayed(tmp_path).divergence is None


def test_columns_of_a_plan_are_read_only() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(0, make_prompt(20)))
    plan = engine.plan()
    assert plan is not None
    (row,) = plan.new_rows
    for column in (plan.chunk_slots, plan.skipped_slots, row.emitted_token_ids, row.block_ids):
        assert not column.flags.writeable
        assert column.dtype == np.uint32


def test_a_row_grows_by_one_block_when_it_crosses_into_it() -> None:
    engine = Engine(make_scheduler(), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(15), max_tokens=40))
    grown = []
    for _ in range(20):
        plan = engine.plan()
        assert plan is not None
        if len(plan.block_ids):
            grown.append((plan.step_id, plan.block_slots.tolist(), plan.block_ids.tolist()))
        engine.finish_step()
    # Step 1 computes positions 0..14, step 2 position 15, step 3 position 16: the second block's first.
    assert grown == [(3, [0], [2]), (19, [0], [3])]


def test_a_request_whose_rest_is_in_flight_is_skipped() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(0, make_prompt(5), max_tokens=2), make_request(1, make_prompt(6), max_tokens=9))
    engine.plan()
    engine.plan()
    third = engine.plan()
    assert third is not None
    assert third.skipped_slots.tolist() == [0]
    assert counts_by_number(engine.scheduler, third) == {1: 1}


def test_nothing_to_compute_is_no_plan() -> None:
    engine = Engine(make_scheduler())
    assert engine.plan() is None
    engine.add(make_request(0, make_prompt(5), max_tokens=1))
    assert engine.plan() is not None
    assert engine.plan() is None
    assert engine.scheduler.has_work
    engine.finish_step()
    assert engine.plan() is None
    assert not engine.scheduler.has_work


def test_the_next_plan_removes_a_row_and_may_reuse_its_slot() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(make_request(0, make_prompt(5), max_tokens=1))
    engine.plan()
    engine.finish_step()
    assert engine.plan() is None, "a removal alone is no work"
    engine.add(make_request(1, make_prompt(6), max_tokens=1))
    plan = engine.plan()
    assert plan is not None
    assert plan.removed_slots.tolist() == [0]
    assert [(row.slot, row.slot_version) for row in plan.new_rows] == [(0, 1)]
    assert plan.last_result_seen == 1
    engine.finish_step()


def test_a_budget_below_the_number_of_rows_skips_the_last() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4), steps_in_flight=1)
    for number in range(3):
        engine.add(make_request(number, make_prompt(2, seed=number), max_tokens=5))
    assert counts_by_number(engine.scheduler, engine.plan()) == {0: 2, 1: 2}
    engine.finish_step()
    assert counts_by_number(engine.scheduler, engine.plan()) == {0: 1, 1: 1, 2: 2}
    engine.finish_step()
    engine.add(make_request(3, make_prompt(9), max_tokens=5), make_request(4, make_prompt(9), max_tokens=5))
    assert counts_by_number(engine.scheduler, engine.plan()) == {0: 1, 1: 1, 2: 1, 3: 1}
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    assert counts_by_number(engine.scheduler, plan) == {0: 1, 1: 1, 2: 1, 3: 1}
    engine.run()


@pytest.mark.parametrize("length", [16, 48])
def test_a_prompt_cached_whole_computes_only_its_last_token(length: int) -> None:
    engine = Engine(make_scheduler(), steps_in_flight=1)
    prompt = make_prompt(length)
    engine.add(make_request(0, prompt, max_tokens=3))
    engine.run()
    cells = dict(engine.worker.cells)
    engine.add(make_request(1, prompt, max_tokens=3))
    plan = engine.plan()
    assert plan is not None
    (row,) = plan.new_rows
    assert (row.num_computed_tokens, row.num_cached_tokens, plan.num_tokens) == (length - 1, length, 1)
    assert row.block_ids.tolist() == list(range(1, length // 16 + 1))
    engine.finish_step()
    assert engine.worker.cells == cells, "the shared block is not written to"
    plan = engine.plan()
    assert plan is not None
    assert len(plan.block_ids) == 1, "the next position stands in a block of its own"
    assert plan.block_ids.tolist() != row.block_ids.tolist()[-1:]
    engine.run()
    request = engine.outcomes[0, 1].request
    assert request.num_cached_tokens == length - 1
    assert engine.scheduler.counters.num_scheduled_tokens == (length + 2) + 3
    assert engine.scheduler.counters.prefix_hits == length - 1


def test_logprobs_of_a_prompt_read_no_cache_but_fill_it() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(50)
    engine.add(make_request(0, prompt, prompt_logprobs=1), make_request(1, prompt, prompt_logprobs=1))
    engine.add(make_request(2, prompt))
    assert counts_by_number(engine.scheduler, engine.plan()) == {0: 50, 1: 50, 2: 2}
    assert engine.scheduler.counters.prefix_queries == 50


CASES: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 40},
    {"max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 40, "min_tokens": 40},
    {"max_tokens": 40, "min_tokens": 20},
    {"max_tokens": 40, "stop_token_ids": (3, 30, 12)},
    {"max_tokens": 40, "stop_token_ids": (EOS,), "ignore_eos": True},
    {"max_tokens": 40, "stop_token_ids": (EOS,)},
    {"max_tokens": None},
    {"max_tokens": None, "ignore_eos": True},
]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
def test_every_stop_ends_at_the_right_token(steps_in_flight: int) -> None:
    engine = Engine(
        make_scheduler(eos_token_ids=(EOS, 11), max_model_len=90, max_num_seqs=7),
        steps_in_flight=steps_in_flight,
    )
    reasons: list[tuple[FinishReason, int | None]] = []
    for number in range(4 * len(CASES)):
        prompt = make_prompt(1 + number % 37, seed=number)
        engine.add(make_request(number, prompt, **CASES[number % len(CASES)]))
    engine.run()
    for number in range(4 * len(CASES)):
        sampling = SamplingParams(**CASES[number % len(CASES)])
        prompt = make_prompt(1 + number % 37, seed=number)
        expected = naive_generation(prompt, number, sampling, (EOS, 11), 90)
        assert engine.end_of(number) == expected
        reasons.append(expected[1:])
    assert {(reason, stop is None) for reason, stop in reasons} == {
        (FinishReason.LENGTH, True),
        (FinishReason.STOP, True),
        (FinishReason.STOP, False),
    }, "the cases reach every way to stop"


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
def test_a_stop_overruns_by_less_than_the_pipeline(steps_in_flight: int) -> None:
    engine = Engine(
        make_scheduler(eos_token_ids=(EOS,), enable_prefix_caching=False), steps_in_flight=steps_in_flight
    )
    needed, num_stops = 0, 0
    for number in range(20):
        prompt, sampling = make_prompt(10, seed=number), SamplingParams(max_tokens=60)
        outputs, reason, _ = naive_generation(prompt, number, sampling, (EOS,), 2048)
        engine.add(make_request(number, prompt, max_tokens=60))
        needed += len(prompt) + len(outputs) - 1
        num_stops += reason is FinishReason.STOP
    engine.run()
    assert num_stops > 5
    scheduled = engine.scheduler.counters.num_scheduled_tokens
    assert needed <= scheduled <= needed + num_stops * (steps_in_flight - 1)


@pytest.mark.parametrize(("eos_token_ids", "stop_token_id"), [((3, 9), None), ((9, 3), 3)])
def test_an_end_of_text_that_is_not_the_tokenizers_own_is_named(eos_token_ids, stop_token_id) -> None:
    scheduler = make_scheduler(eos_token_ids=eos_token_ids)
    scheduler.requests.add(make_request(0, [1, 2], stop_token_ids=(3,)))
    scheduler.schedule()
    (finished,) = scheduler.update(result(1, 3)).finished
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, stop_token_id)


def test_outputs_name_session_request_and_row_of_each_token() -> None:
    engine = Engine(make_scheduler(), steps_in_flight=1)
    engine.add(make_request(5, make_prompt(3), session=2, max_tokens=1))
    engine.add(make_request(9, make_prompt(4), session=1, max_tokens=3))
    engine.plan()
    output = engine.finish_step()
    assert (output.sessions.tolist(), output.numbers.tolist(), output.rows.tolist()) == (
        [2, 1],
        [5, 9],
        [0, 1],
    )
    assert [finished.request.number for finished in output.finished] == [5]
    engine.plan()
    output = engine.finish_step()
    assert (output.sessions.tolist(), output.numbers.tolist(), output.rows.tolist()) == ([1], [9], [0])


def test_a_dropped_token_leaves_the_rows_of_the_others_in_place() -> None:
    engine = Engine(make_scheduler(), steps_in_flight=2)
    engine.add(make_request(0, make_prompt(3), max_tokens=9), make_request(1, make_prompt(4), max_tokens=9))
    engine.plan()
    engine.plan()
    assert engine.scheduler.requests.abort(0, 0) is not None
    output = engine.finish_step()
    assert (output.numbers.tolist(), output.rows.tolist()) == ([1], [1])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (result(2, 1), "result of step 2, but step 1 is due"),
        (result(1, 1, 2), "result of step 1 has 2 tokens, 1 were planned"),
        (result(1), "result of step 1 has 0 tokens, 1 were planned"),
    ],
)
def test_a_result_of_another_plan_changes_nothing(wrong: StepResult, why: str) -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(0, make_prompt(3), max_tokens=3))
    engine.plan()
    engine.plan()
    with pytest.raises(ProtocolViolation, match=why):
        engine.scheduler.update(wrong)
    engine.run()
    assert len(engine.tokens[0, 0]) == 3


def test_a_result_without_a_plan_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="no step is in flight"):
        make_scheduler().update(result(1))


@pytest.mark.parametrize("num_emitted", [0, 1, 15, 39])
def test_a_request_with_emitted_tokens_continues_the_same(num_emitted: int) -> None:
    prompt, sampling = make_prompt(21), SamplingParams(max_tokens=40)
    outputs, _, _ = naive_generation(prompt, 5, sampling, (), 2048)
    engine = Engine(make_scheduler())
    engine.add(make_request(1, prompt, emitted=outputs[:num_emitted], seed=5, max_tokens=40))
    engine.run()
    assert engine.tokens[0, 1] == outputs[num_emitted:]


def test_timings_tell_the_stages_apart() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock), steps_in_flight=1)
    request = make_request(0, make_prompt(3), max_tokens=2)
    engine.add(request)
    for seconds in (1, 2):
        clock.now += seconds
        engine.plan()
        clock.now += seconds
        engine.finish_step()
    assert request.timings == StageTimings(10**9, 10**9, 4 * 10**9)


def test_counters_add_up() -> None:
    engine = Engine(make_scheduler(eos_token_ids=(EOS,)))
    lengths: Sequence[int] = (40, 3, 17)
    for number, length in enumerate(lengths):
        engine.add(make_request(number, make_prompt(length, seed=number), max_tokens=10, ignore_eos=True))
    engine.scheduler.requests.abort(0, 1)
    engine.run()
    counters = engine.scheduler.counters
    assert counters.num_finished == {"stop": 0, "length": 2, "repetition": 0, "abort": 1, "error": 0}
    assert (counters.prefix_queries, counters.prefix_hits, counters.num_preemptions) == (57, 0, 0)
    assert counters.num_scheduled_tokens == engine.worker.num_tokens_computed == 57 + 2 * 9
    assert counters.num_steps == 10


def test_block_sizes_other_than_powers_of_two_work() -> None:
    engine = Engine(
        make_scheduler(block_size=7, num_blocks=100, max_model_len=200), NaiveWorker(block_size=7)
    )
    prompt = make_prompt(50)
    for number in range(4):
        engine.add(make_request(number, prompt, max_tokens=30))
    engine.run()
    for number in range(4):
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=30), (), 200)
        assert engine.tokens[0, number] == expected[0]


def test_watched_tokens_are_those_of_running_requests() -> None:
    watched = WatchedTokens([EOS])
    probe = np.array([0, EOS, 5, 9, 0xFFFFFFFE], np.uint32)
    watched.add((5, 9))
    watched.add((9,))
    assert watched.among(probe).tolist() == [False, True, True, True, False]
    watched.discard((5, 9))
    assert watched.among(probe).tolist() == [False, True, False, True, False]
    watched.discard((9,))
    assert watched.among(probe).tolist() == [False, True, False, False, False]
    assert watched.among(probe[:0]).tolist() == []


def test_a_request_that_has_ended_leaves_no_stop_id_behind() -> None:
    engine = Engine(make_scheduler())
    before = engine.scheduler.snapshot().num_watched_tokens
    engine.add(make_request(0, [1], stop_token_ids=(5, 6), max_tokens=3))
    engine.run()
    assert engine.scheduler.snapshot().num_watched_tokens == before


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_row_is_reused_once_its_last_token_is_planned(steps_in_flight: int) -> None:
    engine = Engine(make_scheduler(max_num_seqs=2), steps_in_flight=steps_in_flight)
    for number in range(6):
        engine.add(make_request(number, make_prompt(5, seed=number), max_tokens=5, ignore_eos=True))
    num_steps = 0
    while engine.scheduler.has_work:
        while len(engine.plans) < steps_in_flight and engine.plan() is not None:
            num_steps += 1
        engine.finish_step()
    assert num_steps == 3 * 5  # three pairs of five tokens, with no step between them
    assert engine.scheduler.counters.num_preemptions == 0
    for number in range(6):
        tokens, reason, _ = engine.end_of(number)
        assert (len(tokens), reason) == (5, FinishReason.LENGTH)
