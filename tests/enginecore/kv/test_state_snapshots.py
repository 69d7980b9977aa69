"""States that are kept where prompts end: what is computed again, and what is not kept for want of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.enginecore.scheduler.test_shared_prompts import make_choices
from tests.helpers.scheduling import (
    Engine,
    NaiveWorker,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan

FULL = KvGroup(KvKind.FULL, 1, 16, 1024)
WIDE = KvGroup(KvKind.WINDOW, 1, 32, 1024, 64)
STATE = KvGroup(KvKind.STATE, 1, 256, 4096)
ANSWER = 20


def make_engine(
    *groups: KvGroup, num_pages: int = 200, continues_states: bool = True, **options: Any
) -> Engine:
    kv = KvLayout(
        2000,
        16,
        1,
        1,
        1,
        "float32",
        groups=groups,
        num_state_blocks=1 + num_pages,
        continues_states=continues_states,
    )
    config = {"max_model_len": 4400, "max_num_batched_tokens": 512, "max_num_seqs": 8, **options}
    return Engine(make_scheduler(kv=kv, **config), NaiveWorker(groups=groups))


def run(engine: Engine, number: int, prompt: Sequence[int], num_new: int = ANSWER) -> tuple[list[int], int]:
    """Run a request alone, and return its tokens and how many tokens of its prompt were computed."""
    before = engine.worker.num_tokens_computed
    engine.add(make_request(number, prompt, max_tokens=num_new, seed=0, ignore_eos=True))
    engine.run()
    tokens = engine.tokens[0, number]
    sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
    assert tokens == naive_generation(prompt, 0, sampling, (), 4400)[0]
    return tokens, engine.worker.num_tokens_computed - before - (num_new - 1)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("groups", [(FULL, STATE), (STATE,), (FULL, WIDE, STATE)])
@pytest.mark.parametrize("length", [600, 768, 769])
def test_of_the_same_prompt_its_last_blocks_tokens_are_computed_again(
    groups: tuple[KvGroup, ...], length: int
) -> None:
    engine = make_engine(*groups)
    prompt = make_prompt(length)
    answer, num_computed = run(engine, 0, prompt)
    assert num_computed == length
    unit = 32 if WIDE in groups else 16  # all groups must have a block that ends there
    rest = length - (length - 1) // unit * unit
    assert run(engine, 1, prompt)[1] == rest
    message = make_prompt(30, seed=1)
    assert run(engine, 2, [*prompt, *answer, *message])[1] <= rest + ANSWER + 30
    before = make_engine(*groups, continues_states=False)
    run(before, 0, prompt)
    assert run(before, 1, prompt)[1] == length - (length - 1) // 256 * 256


def test_a_moved_request_goes_on_from_the_last_state_that_is_here() -> None:
    """It was computed elsewhere, and here another request with its prompt, and one that went on with the answer."""
    engine = make_engine(FULL, WIDE, STATE)
    prompt = make_prompt(600)
    answer, _ = run(engine, 0, prompt, num_new=80)
    for number, num_emitted, num_known in ((1, 5, 576), (2, 70, 576), (3, 79, 672)):
        if number == 3:
            run(engine, 9, [*prompt, *answer])
        before = engine.worker.num_tokens_computed
        emitted = answer[:num_emitted]
        engine.add(
            make_request(
                number, prompt, emitted=emitted, is_moved=True, max_tokens=80, seed=0, ignore_eos=True
            )
        )
        engine.run()
        assert [*emitted, *engine.tokens[0, number]] == answer
        assert engine.worker.num_tokens_computed - before == len(prompt) + 79 - num_known


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("length", [289, 15, 16, 17, 31, 33, 48, 255, 256, 257, 271, 273, 287, 290, 304, 305])
@pytest.mark.parametrize("budget", [512, 19])
def test_prompts_that_end_anywhere_are_found_again(length: int, budget: int) -> None:
    engine = make_engine(FULL, STATE, max_num_batched_tokens=budget)
    prompt = make_prompt(length)
    answer, _ = run(engine, 0, prompt)
    end, page = (length - 1) // 16 * 16, (length - 1) // 256 * 256
    expected = end if end - page >= 256 // 8 else page  # a step more must save something
    assert run(engine, 1, prompt)[1] == length - expected
    turn = [*prompt, *answer, *make_prompt(5, seed=1)]
    answer, num_computed = run(engine, 2, turn)
    assert num_computed <= len(turn) - expected
    run(engine, 3, [*turn, *answer, *make_prompt(5, seed=2)])


def test_choices_of_one_prompt_go_on_where_it_ends() -> None:
    engine = make_engine(FULL, STATE, enable_prefix_caching=False)
    prompt = make_prompt(200)
    engine.add_choices(*make_choices(range(4), prompt, sampling={"max_tokens": 2}))
    engine.run()
    for number in range(4):
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=2), (), 4400)
        assert engine.end_of(number) == expected
    assert engine.worker.num_tokens_computed == 192 + 4 * (8 + 1)


def pages_of(plans: list[StepPlan]) -> list[int]:
    return [page for plan in plans for page in plan.state_pages.tolist()]


def plans_of(engine: Engine) -> list[StepPlan]:
    plans = []
    while (plan := engine.plan()) is not None:
        plans.append(plan)
        engine.finish_step()
    return plans


def test_without_a_free_page_the_row_stays_on_its_own() -> None:
    engine = make_engine(FULL, STATE, num_pages=2, max_num_seqs=2)
    prompts = [make_prompt(100, seed=seed) for seed in range(2)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, max_tokens=9, ignore_eos=True))
    assert pages_of(plans_of(engine)) == [], "both pages are held"
    assert engine.scheduler.counters.num_preemptions == 0
    for number, prompt in enumerate(prompts, 2):
        engine.add(make_request(number, prompt, max_tokens=9, ignore_eos=True))
        (page,) = pages_of(plans_of(engine))
        assert page
    assert engine.scheduler.counters.prefix_hits == 0
    engine.add(make_request(4, prompts[1], max_tokens=9, ignore_eos=True))
    assert len(pages_of(plans_of(engine))) == 1, "of the snapshot, on a page of its own"
    assert engine.scheduler.counters.prefix_hits == 96


def test_states_are_evicted_like_other_pages() -> None:
    """Two of three pages are kept beside the row that runs: those of the latest prompts."""
    engine = make_engine(FULL, STATE, num_pages=3, max_num_seqs=1)
    prompts = [make_prompt(100, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        run(engine, number, prompt)
    assert [run(engine, 4 + seed, prompts[seed])[1] for seed in (3, 2)] == [4, 4]
    assert run(engine, 8, prompts[0])[1] == 100


def test_equal_prompts_side_by_side_keep_one_state() -> None:
    engine = make_engine(FULL, STATE)
    prompt = make_prompt(100)
    for number in range(3):
        engine.add(make_request(number, prompt, max_tokens=5, seed=0, ignore_eos=True))
    assert len(pages_of(plans_of(engine))) == 1
    engine.add(make_request(3, prompt, max_tokens=5, seed=0, ignore_eos=True))
    assert len(pages_of(plans_of(engine))) == 1
    assert engine.scheduler.counters.prefix_hits == 96
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 1


def test_a_worker_of_before_is_sent_no_pages() -> None:
    engine = make_engine(FULL, STATE, continues_states=False)
    prompt = make_prompt(300)
    for number in range(2):
        engine.add(make_request(number, prompt, max_tokens=5, ignore_eos=True))
        assert pages_of(plans_of(engine)) == []
    assert engine.scheduler.counters.prefix_hits == 256


def test_what_a_failed_row_has_kept_is_not_found() -> None:
    engine = make_engine(FULL, STATE)
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt, max_tokens=50, ignore_eos=True))
    for _ in range(6):  # the page that was kept has been given back
        engine.plan()
        engine.finish_step()
    engine.plan()
    engine.finish_step(failing_slots=[0])
    engine.add(make_request(1, prompt, max_tokens=5, ignore_eos=True))
    engine.run()
    assert engine.scheduler.counters.prefix_hits == 0
    assert engine.end_of(1) == naive_generation(
        prompt, 1, SamplingParams(max_tokens=5, ignore_eos=True), (), 4400
    )


def test_a_lost_worker_leaves_no_page_behind() -> None:
    engine = make_engine(FULL, STATE, num_pages=4, max_num_seqs=2)
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt, max_tokens=9, ignore_eos=True))
    plan = engine.plan()
    while plan is not None and not len(plan.state_slots):
        engine.finish_step()
        plan = engine.plan()
    assert plan is not None
    engine.lose_worker()
    engine.run()
    assert (
        engine.end_of(0)[0]
        == naive_generation(prompt, 0, SamplingParams(max_tokens=9, ignore_eos=True), (), 4400)[0]
    )
    assert engine.scheduler.snapshot().num_used_blocks == 0
