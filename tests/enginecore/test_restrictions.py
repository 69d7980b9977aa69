"""Which request kills the workers: found in few crashes, and never an innocent one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.helpers.scheduling import BLOCK_SIZE, NAIVE_IDENTITY, make_request
from tests.helpers.stack import make_config
from triptych.errors import EngineFailure
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.restrictions import CrashBisect

PROBATION = 32


def requests(count: int) -> list[Request]:
    return [make_request(number, [1, 2]) for number in range(count)]


def end(request: Request) -> None:
    request.state = RequestState.ENDED


def crash(bisect: CrashBisect, in_flight: Sequence[Request]) -> Request | None:
    return bisect.note_crash({request: len(request.token_ids) for request in in_flight})


def in_flight(bisect: CrashBisect, alive: Sequence[Request]) -> list[Request]:
    """Everybody who may run does."""
    bisect.review()
    under_test = bisect.under_test
    return [r for r in alive if r.state is not RequestState.ENDED and (under_test is None or r in under_test)]


def survive(bisect: CrashBisect, group: Sequence[Request], num_tokens: int = PROBATION) -> None:
    """Each of them goes so many tokens further."""
    for request in group:
        request.token_ids.extend([3] * num_tokens)
    bisect.review()


@given(count=st.integers(1, 70), suspect=st.integers(0, 69))
def test_the_request_that_kills_is_found_in_log3_crashes(count, suspect) -> None:
    alive, bisect = requests(count), CrashBisect()
    poison = alive[suspect % count]
    for num_crashes in range(1, 100):
        while poison not in (group := in_flight(bisect, alive)):
            assert group, "no request may run"
            survive(bisect, group)
        killer = crash(bisect, group)
        if killer is not None:
            assert killer is poison
            assert num_crashes <= 2 + math.ceil(round(math.log(count, 3), 6))
            assert bisect.under_test is None
            assert not bisect.has_suspects
            return
    raise AssertionError("never found")


def test_a_single_crash_fails_no_request() -> None:
    alive, bisect = requests(1), CrashBisect()
    for _ in range(4):
        assert crash(bisect, alive) is None
        assert bisect.under_test is None
        survive(bisect, alive)
        assert not bisect.has_suspects


def test_a_request_alone_at_two_crashes_fails() -> None:
    alive, bisect = requests(1), CrashBisect()
    assert crash(bisect, alive) is None
    survive(bisect, alive, PROBATION - 1)
    assert crash(bisect, alive) is alive[0]


def test_computing_the_same_again_clears_no_suspect() -> None:
    (request,), bisect = requests(1), CrashBisect()
    assert bisect.note_crash({request: 100}) is None
    survive(bisect, [request], 100 + PROBATION - 1 - len(request.token_ids))
    assert bisect.has_suspects
    survive(bisect, [request], 1)
    assert not bisect.has_suspects


def test_a_suspect_that_waits_stays_suspect() -> None:
    (first, second), bisect = requests(2), CrashBisect()
    crash(bisect, [first, second])
    survive(bisect, [first], 1000)
    crash(bisect, [first, second])
    assert bisect.under_test == [second]


def test_the_only_common_suspect_is_tested_by_itself_first() -> None:
    (first, second, third), bisect = requests(3), CrashBisect()
    assert crash(bisect, [first, second]) is None
    assert crash(bisect, [second, third]) is None
    assert bisect.under_test == [second]
    survive(bisect, [second])
    assert bisect.under_test is None
    assert bisect.has_suspects, "the others have not gone on yet"
    survive(bisect, [first, third])
    assert not bisect.has_suspects


def test_crashes_of_different_requests_find_no_suspect() -> None:
    alive, bisect = requests(4), CrashBisect()
    assert crash(bisect, alive[:2]) is None
    assert crash(bisect, alive[2:]) is None
    assert bisect.under_test is None


def test_an_idle_workers_crash_changes_nothing() -> None:
    alive, bisect = requests(2), CrashBisect()
    assert crash(bisect, []) is None
    assert not bisect.has_suspects
    crash(bisect, alive)
    crash(bisect, alive)
    under_test = bisect.under_test
    assert crash(bisect, []) is None
    assert bisect.under_test == under_test


def test_five_crashes_in_a_row_start_a_test() -> None:
    (suspect, *others), bisect = requests(6), CrashBisect()
    for other in others[:4]:
        assert crash(bisect, [suspect, other]) is None
        survive(bisect, [suspect, other], 100)
        assert bisect.under_test is None
    assert crash(bisect, [suspect, others[4]]) is None
    assert bisect.under_test == [suspect]
    survive(bisect, [suspect], 100)
    assert crash(bisect, [suspect]) is suspect


def test_a_crash_of_others_than_the_group_tests_those() -> None:
    """This happens while an operator's pause keeps the group from running."""
    (first, second), bisect = requests(2), CrashBisect()
    crash(bisect, [first, second])
    crash(bisect, [first, second])
    assert bisect.under_test == [first]
    assert crash(bisect, [second]) is second


@pytest.mark.parametrize("count", [2, 5])
def test_a_test_is_over_when_its_suspects_have_ended(count) -> None:
    alive, bisect = requests(count), CrashBisect()
    crash(bisect, alive)
    crash(bisect, alive)
    while bisect.under_test:
        for request in list(bisect.under_test):
            end(request)
        bisect.review()
    assert all(request.state is RequestState.ENDED for request in alive)
    assert not bisect.has_suspects


class DyingWorker:
    """Counts what rows compute, and dies in the step that brings one row to a position."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position
        self._rows: dict[int, list[int]] = {}  # slot -> known, computed, seed

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run the plan; return None if the worker dies of it."""
        for slot in plan.removed_slots.tolist():
            del self._rows[slot]
        for row in plan.new_rows:
            self._rows[row.slot] = [row.token_ids.size, row.num_computed_tokens, row.seed]
        counts = dict.fromkeys(self._rows, 1)
        counts.update(zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True))
        counts.update(dict.fromkeys(plan.skipped_slots.tolist(), 0))
        num_sampled = 0
        for slot, row in self._rows.items():
            row[1] += counts[slot]
            if counts[slot] and row[2] == self._seed and row[1] >= self._position:
                return None
            if counts[slot] and row[0] == row[1]:
                row[0] += 1
                num_sampled += 1
        return StepResult(plan.step_id, np.ones(num_sampled, np.uint32))


def num_crashes_until_found(
    num_others: int, lengths: Sequence[int], budget: int, suspect: int, num_tokens: int
) -> int:
    """Run everything to its end; only the culprit fails.

    Args:
        lengths: Prompt lengths, taken in turn.
        num_tokens: Of its prompt and output that the culprit computes before it kills its worker.
    """
    num_requests = num_others + 1
    suspect %= num_requests
    prompts = [lengths[number % len(lengths)] for number in range(num_requests)]
    longest = max(prompts) + 100
    engine = EngineCore(
        make_config(max_num_seqs=64, max_num_batched_tokens=budget, max_num_waiting=64), lambda: 0.0
    )
    facts = WorkerFacts(
        boot_id="1",
        model=ModelFacts(
            "none",
            NAIVE_IDENTITY,
            1000,
            longest,
            (),
            "float32",
            "float32",
            "none",
        ),
        kv=KvLayout(2 + max(longest, sum(prompts) * 2 // 3) // BLOCK_SIZE, BLOCK_SIZE, 1, 1, 1, "float32"),
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_steps_in_flight=4,
    )
    engine.worker_ready(facts, after_crash=False)
    engine.frontends.open_session(1)
    for number, length in enumerate(prompts):
        token_ids = np.full(length, number, np.uint32)
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.frontends.submit(1, single_choice(number, f"{number}", token_ids, sampling, seed=number))
    position = prompts[suspect] + num_tokens
    worker, plans, num_crashes = DyingWorker(suspect, position), deque[StepPlan](), 0
    failed, finished = [], []
    while engine.num_requests:
        while len(plans) < 2 and (plan := engine.plan()) is not None:
            plans.append(plan)
        result = worker.execute(plans.popleft())
        if result is None:
            num_crashes += 1
            assert num_crashes < 10, "never found"
            plans.clear()
            worker = DyingWorker(suspect, position)
            engine.worker_lost()
            engine.worker_ready(facts, after_crash=True)
        else:
            engine.apply(result)
        for batch in engine.take_outputs().values():
            failed += batch.failures
            finished += batch.finished
    assert [(end.number, end.code) for end in failed] == [(suspect, EngineFailure.code)]
    assert sorted(end.number for end in finished) == [n for n in range(num_requests) if n != suspect]
    assert all(end.reason is FinishReason.LENGTH for end in finished)
    return num_crashes


@settings(max_examples=25, deadline=None)
@given(
    num_others=st.integers(0, 48),
    lengths=st.lists(st.sampled_from([64, 100, 1000, 4000, 9000]), min_size=1, max_size=5),
    budget=st.sampled_from([512, 2048, 8192]),
    suspect=st.integers(0, 48),
    num_tokens=st.integers(0, 20),
)
@example(num_others=48, lengths=[64], budget=2048, suspect=48, num_tokens=0)
@example(num_others=48, lengths=[4000], budget=2048, suspect=48, num_tokens=5)
@example(num_others=0, lengths=[70_000], budget=2048, suspect=0, num_tokens=0)
@example(num_others=0, lengths=[200_000], budget=2048, suspect=0, num_tokens=0)
@example(num_others=3, lengths=[200_000, 64], budget=8192, suspect=2, num_tokens=0)
def test_a_request_that_kills_anywhere_fails_in_six_crashes(
    num_others, lengths, budget, suspect, num_tokens
) -> None:
    assert num_crashes_until_found(num_others, lengths, budget, suspect, num_tokens) <= 6
