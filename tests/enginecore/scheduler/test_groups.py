"""The scheduler with several groups of layers: all that can happen to it, and what a single request takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import initialize

from tests.enginecore.scheduler.test_machine import MAX_MODEL_LEN, SchedulerMachine
from tests.enginecore.scheduler.test_shared_prompts import make_choices
from tests.helpers.journals import RecordedRun, replayed
from tests.helpers.scheduling import (
    EOS,
    Engine,
    NaiveWorker,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from tests.worker.simulated import simulated_runner
from tools.replay.plan_difference import differences_between, is_same
from triptych.config import SchedulerConfig
from triptych.config.step_size import size_for_device
from triptych.errors import ConfigError
from triptych.types.facts import EngineStatus, KvGroup, KvKind, KvLayout, least_state_page
from triptych.types.journal import Planned
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult, empty_u32
from triptych.wire.admin import status_from_proto, status_to_proto
from triptych.wire.journal import read_journal
from triptych_services.enginecore.kv.groups import longest_step, rules_of
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.scheduler import Scheduler

STEPS_IN_FLIGHT = 2  # as in the facts of `make_scheduler`
BYTES = {False: 1024, True: 4096}

KINDS = st.sampled_from(KvKind)


@st.composite
def layouts(draw: Any, *, least_page: int = 1) -> tuple[KvGroup, ...]:
    """One to four groups. The tokens of a block are a multiple of those of the shortest one.

    Args:
        least_page: Tokens of a page of states, at least.
    """
    block_size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    groups: list[KvGroup] = []
    drawn = draw(st.lists(KINDS, min_size=1, max_size=4))
    state_ratio = 1 if drawn[0] is KvKind.STATE else draw(st.sampled_from([1, 2, 2, 3]))
    if drawn[0] is KvKind.STATE:
        block_size = max(block_size, least_page)
    state_ratio = max(state_ratio, -(-least_page // block_size))
    for kind in drawn:
        window = draw(st.integers(2, 14)) if kind in (KvKind.WINDOW, KvKind.CHUNK) else 0
        ratio = state_ratio if kind is KvKind.STATE else draw(st.sampled_from([1, 1, 1, 2])) if groups else 1
        groups.append(KvGroup(kind, 1, block_size * ratio, BYTES[kind is KvKind.STATE], window))
    return tuple(groups)


@given(layouts(), st.integers(0, 60), st.integers(0, 20))
def test_rows_are_found_that_need_fewer_blocks(
    groups: tuple[KvGroup, ...], reached: int, released: int
) -> None:
    for rules in rules_of(layout_for_one(groups, 60, 4)):
        found = rules.has_needless(np.array([reached]), np.array([released])).tolist()
        assert found == [rules.first_needed(reached) > released] or not rules.releases
        if found == [True] and rules.releases:
            assert rules.nums_needless(np.array([reached])).tolist() == [rules.first_needed(reached)]


def layout_for_one(
    groups: tuple[KvGroup, ...], max_model_len: int, longest: int, *, spare: int = 0, spare_states: int = 0
) -> KvLayout:
    """Return the least blocks that one request of any length fits into, and some more."""
    kv = KvLayout(2, min(group.block_size for group in groups), 1, 1, 1, "float32", groups=groups)
    num_blocks, num_states = 1 + spare, 1 + spare_states
    for rules in rules_of(kv):
        peak = rules.peak(0, max_model_len, longest)
        num_states, num_blocks = num_states + peak * rules.is_state, num_blocks + peak * (not rules.is_state)
    continues_states = sum(group.kind is KvKind.STATE for group in groups) == 1
    return replace(kv, num_blocks=num_blocks, num_state_blocks=num_states, continues_states=continues_states)


class GroupedMachine(SchedulerMachine):
    """The same with up to four groups of any kind. The worker checks each position and each page that is read."""

    @initialize(
        data=st.data(),
        config=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 5),
                "max_num_batched_tokens": st.integers(1, 50),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 6]),
                "max_num_waiting": st.integers(0, 6),
                "max_long_partial_prefills": st.just(0),
                "policy": st.sampled_from(["fcfs", "priority"]),
            }
        ),
        is_caching=st.booleans(),
        max_samples_per_row=st.sampled_from([1, 1, 2, 3]),
        num_stages=st.sampled_from([1, 1, 2]),
        spare_blocks=st.integers(0, 12),
    )
    def start(  # type: ignore[override]
        self,
        data: st.DataObject,
        config: dict[str, Any],
        is_caching: bool,
        max_samples_per_row: int,
        num_stages: int,
        spare_blocks: int,
    ) -> None:
        least_page = 1 if max_samples_per_row == 1 else least_state_page(STEPS_IN_FLIGHT, max_samples_per_row)
        self.groups = data.draw(layouts(least_page=least_page))
        self.begin(
            config,
            is_caching=is_caching,
            is_chunked=True,
            max_samples_per_row=max_samples_per_row,
            num_stages=num_stages,
        )
        self.block_size = min(group.block_size for group in self.groups)
        self.engine = Engine(
            self.make_scheduler(spare_blocks), NaiveWorker(groups=self.groups, draws_guesses=True)
        )

    def make_scheduler(self, spare_blocks: int) -> Scheduler:
        sizes = size_for_device(SchedulerConfig(**self.config), 0)
        max_tokens = sizes.long_prefill_token_threshold or sizes.max_num_batched_tokens
        longest = longest_step(max_tokens, STEPS_IN_FLIGHT, self.max_samples_per_row)
        return make_scheduler(
            kv=layout_for_one(
                self.groups, MAX_MODEL_LEN, longest, spare=spare_blocks, spare_states=spare_blocks // 4
            ),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            enable_prefix_caching=self.is_caching,
            clock=self.clock,
            max_samples_per_row=self.max_samples_per_row,
            num_stages=self.num_stages,
            **self.config,
        )

    def check_nothing_fits(self, plan: StepPlan, candidates: list[Request]) -> None:
        """Say nothing: what fits is counted per group, and `test_one_request_takes_no_more` counts it."""


FULL = KvGroup(KvKind.FULL, 1, 4, BYTES[False])
WINDOW = KvGroup(KvKind.WINDOW, 1, 4, BYTES[False], 10)
WIDE = KvGroup(KvKind.WINDOW, 1, 8, BYTES[False], 24)
CHUNK = KvGroup(KvKind.CHUNK, 1, 4, BYTES[False], 16)
STATE = KvGroup(KvKind.STATE, 1, 12, BYTES[True])
MIXTURES = {
    "windows": (FULL, WINDOW, WINDOW),
    "only_a_window": (WINDOW,),
    "chunks": (FULL, CHUNK),
    "states": (FULL, STATE, STATE),
    "only_states": (replace(STATE, block_size=4),),
    "all_kinds": (WIDE, FULL, STATE, CHUNK),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_requests_with_common_beginnings_get_their_own_tokens(name: str, seed: int) -> None:
    """Sixty requests, few blocks, aborts and failing rows: hits, releases and preemptions of every group."""
    random = Random(seed)
    groups = MIXTURES[name]
    budget = 32
    kv = layout_for_one(groups, 120, longest_step(budget, STEPS_IN_FLIGHT, 1), spare=24, spare_states=4)
    scheduler = make_scheduler(
        kv=kv,
        max_model_len=120,
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        max_num_waiting=100,
        block_size=4,
    )
    engine = Engine(scheduler, NaiveWorker(groups=groups), steps_in_flight=2)
    prefixes = [make_prompt(length, seed=length) for length in (13, 40, 61)]
    failed, aborted = set[int](), set[int]()
    for number in range(60):
        prompt = random.choice(prefixes)[: random.randint(8, 61)] + make_prompt(
            random.randint(1, 9), seed=number
        )
        engine.add(make_request(number, prompt, max_tokens=random.randint(1, 40), seed=number))
        for _ in range(random.randint(0, 6)):
            while len(engine.plans) < 2 and engine.plan() is not None:
                pass
            if engine.plans:
                slots = [random.randrange(6)] if random.random() < 0.03 else []
                for outcome in engine.finish_step(failing_slots=slots).failed:
                    failed.add(outcome.request.number)
        if random.random() < 0.1 and (
            outcome := scheduler.requests.abort(0, victim := random.randint(0, number))
        ):
            engine.note(outcome)
            aborted.add(victim)
    engine.run()
    for number in set(range(60)) - failed - aborted:
        request = engine.outcomes[0, number].request
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        tokens, *_ = naive_generation(prompt, number, request.sampling, (), 120)
        assert engine.tokens[0, number] == tokens
    assert scheduler.counters.prefix_hits > 0
    assert scheduler.snapshot().num_used_blocks == 0
    assert len(aborted) < 20
    assert len(failed) < 20


def test_a_prompt_of_32k_tokens_holds_what_its_windows_see() -> None:
    """Five windows of 1,024 to one full group: the full one holds all, each window its width and one step."""
    full = KvGroup(KvKind.FULL, 4, 16, 1 << 16)
    window = KvGroup(KvKind.WINDOW, 4, 16, 1 << 16, 1024)
    length, budget = 32768, 2048
    kv = KvLayout(20_000, 16, 1, 1, 1, "float32", groups=(full, *[window] * 5))
    scheduler = make_scheduler(
        kv=kv, max_model_len=length + 64, max_num_batched_tokens=budget, max_num_seqs=1
    )
    scheduler.requests.add(make_request(0, make_prompt(length), max_tokens=40))
    most = steps = 0
    while (plan := scheduler.schedule()) is not None:
        most = max(most, scheduler.snapshot().num_used_blocks)
        samples = int(scheduler.snapshot().steps_in_flight[-1].sampling_slots.size)
        scheduler.update(StepResult(plan.step_id, np.ones(samples, np.uint32)))
        steps += 1
    most_of_window = (1024 - 1 + budget - 2) // 16 + 2
    assert steps == length // budget + 39
    assert most <= -(-length // 16) + 5 * most_of_window
    assert scheduler.snapshot().num_used_blocks == 0


def test_while_it_decodes_a_window_holds_its_width() -> None:
    kv = KvLayout(500, 16, 1, 1, 1, "float32", groups=(KvGroup(KvKind.WINDOW, 1, 16, 1024, 64),))
    engine = Engine(
        make_scheduler(kv=kv, max_model_len=1000, max_num_batched_tokens=100), NaiveWorker(groups=kv.groups)
    )
    engine.add(make_request(0, make_prompt(300), max_tokens=200))
    while engine.plan() is not None:
        engine.finish_step()
        if len(engine.tokens[0, 0]) > 2:
            assert engine.scheduler.snapshot().num_used_blocks <= 64 // 16 + 2
    assert len(engine.tokens[0, 0]) == 200


def test_a_step_never_goes_beyond_the_end_of_a_state() -> None:
    kv = layout_for_one((FULL, STATE), 200, 64, spare=20, spare_states=5)
    scheduler = make_scheduler(kv=kv, max_model_len=200, max_num_batched_tokens=64, max_num_seqs=8)
    engine = Engine(scheduler, NaiveWorker(groups=kv.groups))
    prompt = make_prompt(40)
    engine.add(make_request(0, prompt, max_tokens=20))
    starts = []
    while (plan := engine.plan()) is not None:
        starts.append(plan.num_tokens)
        engine.finish_step()
    assert starts[:4] == [12, 12, 12, 4]
    engine.add(make_request(1, prompt[:30], max_tokens=1))
    plan = engine.plan()
    assert plan is not None
    (row,) = plan.new_rows
    assert row.num_computed_tokens == 24, "it goes on behind the last snapshot"
    assert row.group_block_ids[0].tolist()[0] == 0, "of the snapshots before it needs none"


def test_status_counts_blocks_by_kind_of_group() -> None:
    groups = (FULL, WINDOW, WINDOW, STATE)
    kv = layout_for_one(groups, 200, 64, spare=60, spare_states=5)
    scheduler = make_scheduler(kv=kv, max_model_len=200, max_num_batched_tokens=64, max_num_seqs=8)
    engine = Engine(scheduler, NaiveWorker(groups=groups))
    prompt = make_prompt(49)
    for number in range(2):
        engine.add(make_request(number, prompt, max_tokens=1))
        engine.run()
    engine.add(make_request(2, prompt, max_tokens=20, ignore_eos=True))
    engine.plan()
    status = scheduler.add_counts(EngineStatus("e", True, ""), kv, now=0.0)
    full, window, state = status.groups
    assert [group.name for group in status.groups] == ["full", "window-10", "state"]
    assert [group.num_groups for group in status.groups] == [1, 2, 1]
    assert full.num_blocks == window.num_blocks == kv.num_blocks - 1
    # 48 tokens are hit, of which the next sees 9 in a window, and the state behind them; one more block is begun
    assert (full.num_used_blocks, full.num_hit_blocks) == (12 + 1, 2 * 12)
    assert (window.num_used_blocks, window.num_hit_blocks) == (2 * (3 + 1), 2 * 2 * 3)
    assert (state.num_used_blocks, state.num_hit_blocks, state.num_snapshots) == (2, 2 * 1, 4)
    assert full.num_released_blocks == 0
    # position 49 sees 40 and later ones: the first request has released 10 blocks, and the second, which had no use of
    # the first 9, one
    assert window.num_released_blocks == 2 * 11
    assert status_from_proto(status_to_proto(status, "m"))[1].groups == status.groups
    successor = make_scheduler(kv=kv, max_model_len=200, max_num_batched_tokens=64, max_num_seqs=8)
    successor.adopt(scheduler)
    _, window, _ = successor.add_counts(status, kv, now=0.0).groups
    assert (window.num_used_blocks, window.num_released_blocks) == (0, 2 * 11)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"groups": (FULL, replace(WINDOW, block_bytes=512))}, r"group 1 \(window\) has blocks of 512 bytes"),
        ({"groups": (FULL, replace(WINDOW, block_size=6))}, r"group 1 \(window\) has 6 tokens per block"),
        ({"groups": (FULL, replace(WINDOW, window=0))}, "a window of 0 positions"),
        ({"groups": (FULL, STATE, replace(STATE, block_size=8))}, "has pages of 8 tokens"),
        ({"groups": (FULL, STATE, STATE)}, r"group 2 \(state\) is the second of states"),
        (
            {"num_blocks": 20},
            r"max_model_len 100 does not fit into 19 KV blocks: one request takes up to \d+",
        ),
        ({"num_state_blocks": 2}, "does not fit into 1 pages of recurrent state: one request takes up to 2"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(change: dict[str, Any], named: str) -> None:
    kv = layout_for_one((FULL, WINDOW, STATE), 100, 64)
    make_scheduler(kv=kv, max_model_len=100, max_num_batched_tokens=64, max_num_seqs=8)
    with pytest.raises(ConfigError, match=named):
        make_scheduler(kv=replace(kv, **change), max_model_len=100, max_num_batched_tokens=64, max_num_seqs=8)


def test_states_are_refused_beside_what_cannot_keep_them() -> None:
    kv = layout_for_one((FULL, STATE), 100, 128)
    with pytest.raises(
        ConfigError, match="pages of 12 tokens, and rows with up to 5 tokens in a step need 15"
    ):
        make_scheduler(
            kv=kv, max_model_len=100, max_num_batched_tokens=128, max_num_seqs=8, max_samples_per_row=5
        )
    with pytest.raises(ConfigError, match="prompts are cut every 12 tokens"):
        make_scheduler(
            kv=kv, max_model_len=100, max_num_batched_tokens=128, max_num_seqs=8, enable_chunked_prefill=False
        )


def test_a_worker_takes_every_plan_of_several_groups() -> None:
    """Run steps on the simulated worker, of which the rows refuse a plan that leaves out a block that is read."""
    groups = (FULL, WIDE, CHUNK, STATE)
    kv = layout_for_one(groups, 120, 64, spare=40, spare_states=4)
    runner = simulated_runner(kv=kv, max_model_len=120, max_num_seqs=4, budget=64)
    scheduler = make_scheduler(kv=kv, max_model_len=120, max_num_batched_tokens=64, max_num_seqs=4)
    for number in range(12):
        prompt = make_prompt(50, seed=number % 2) + make_prompt(5, seed=number)
        scheduler.requests.add(make_request(number, prompt, max_tokens=40, ignore_eos=True))
    num_ended = 0
    while (plan := scheduler.schedule()) is not None:
        num_ended += len(scheduler.update(runner.execute(plan)).finished)
    assert num_ended == 12
    assert scheduler.counters.prefix_hits > 0


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_choices_of_one_prompt_share_what_their_groups_can(name: str, is_caching: bool) -> None:
    groups = MIXTURES[name]
    kv = layout_for_one(groups, 130, longest_step(32, STEPS_IN_FLIGHT, 1), spare=60, spare_states=8)
    scheduler = make_scheduler(
        kv=kv,
        max_model_len=130,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_prefix_caching=is_caching,
    )
    engine = Engine(scheduler, NaiveWorker(groups=groups))
    prompt = make_prompt(70)
    engine.add_choices(*make_choices(range(5), prompt))
    for _ in range(4):
        engine.plan()
        engine.finish_step()
    engine.lose_worker()
    engine.run()
    for number in range(5):
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=4), (), 130)
        assert engine.end_of(number) == expected
    assert engine.worker.num_tokens_computed < 5 * 70, "they share nothing"
    assert scheduler.snapshot().num_used_blocks == 0


def record(directory: Path, *, window: int = 10) -> RecordedRun:
    """Record requests of one prompt, a lost worker, and a reset of the cache."""
    groups = (FULL, STATE, replace(WINDOW, window=window))
    run = RecordedRun(directory, kv=layout_for_one(groups, 80, 64, spare=20, spare_states=3)).start()
    for number in range(6):
        run.submit(make_prompt(30 + number, seed=number % 2), sampling={"max_tokens": 30, "ignore_eos": True})
    run.run(9)
    run.lose_worker()
    run.connect(after_crash=True)
    run.run()
    assert run.engine.scheduler.counters.prefix_hits > 0
    run.engine.reset_prefix_cache()
    run.submit(make_prompt(30), sampling={"max_tokens": 3, "ignore_eos": True})
    run.run().engine.close()
    return run


def test_a_journal_of_several_groups_replays_the_same(tmp_path: Path) -> None:
    record(tmp_path)
    assert replayed(tmp_path).divergence is None


def test_a_difference_in_a_further_group_is_named(tmp_path: Path) -> None:
    plans = []
    for window in (10, 14):
        record(tmp_path / str(window), window=window)
        events = read_journal(tmp_path / str(window))
        plans.append(
            [event.what.plan for event in events if isinstance(event.what, Planned) and event.what.plan]
        )
    pairs = zip(*plans, strict=False)
    one, other = next(pair for pair in pairs if not is_same(*pair))
    fields = [difference.field for difference in differences_between(one, other)]
    assert any("block" in field for field in fields), fields
    row = NewRow(0, 1, RowContent(one.removed_slots, SamplingParams()), empty_u32(), 0, 0, empty_u32(), 0)
    changed = replace(row, group_block_ids=(np.array([4], np.uint32),))
    (difference,) = differences_between(replace(one, new_rows=(row,)), replace(one, new_rows=(changed,)))
    assert difference.field == "new_rows[0].group_block_ids[0][0]"


TestGroupedMachine = GroupedMachine.TestCase
TestGroupedMachine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.thorough
class TestGroupedMachineForLong(GroupedMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
