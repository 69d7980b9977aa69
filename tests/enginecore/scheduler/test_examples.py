"""The worked examples of the scheduler's rules, each against the real scheduler; block size 16."""

from __future__ import annotations

import pytest

from tests.helpers.scheduling import Engine, counts_by_number, make_prompt, make_request, make_scheduler
from triptych.types.outputs import FinishReason


def plan_counts(engine: Engine) -> dict[int, int]:
    return counts_by_number(engine.scheduler, engine.plan())


def test_long_prompts_are_split_at_threshold_and_budget() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400))
    engine.add(*(make_request(number, make_prompt(800, seed=number)) for number in range(3)))
    steps = []
    for _ in range(3):
        steps.append(plan_counts(engine))
        engine.finish_step()
    assert steps == [{0: 400, 1: 400, 2: 224}, {0: 400, 1: 400, 2: 224}, {0: 1, 1: 1, 2: 352}]


@pytest.mark.parametrize(("is_chunked", "expected"), [(True, {0: 800, 1: 224}), (False, {0: 800})])
def test_without_chunks_a_prompt_beyond_the_budget_waits(is_chunked: bool, expected: dict[int, int]) -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, max_num_seqs=3, enable_chunked_prefill=is_chunked, max_model_len=1024
    )
    engine = Engine(scheduler)
    for number, length in enumerate((800, 800, 10, 10)):
        engine.add(make_request(number, make_prompt(length, seed=number)))
    assert plan_counts(engine) == expected


def test_lower_priority_numbers_run_first_and_ties_go_by_arrival() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), steps_in_flight=1)
    for number, priority in enumerate((3, 2, 0, 2)):
        engine.add(make_request(number, make_prompt(5, seed=number), priority=priority, max_tokens=2))
    assert plan_counts(engine) == {2: 5}
    assert len(engine.scheduler.snapshot().waiting) == 3
    engine.run()
    assert [number for _, number in engine.outcomes] == [2, 1, 3, 0]


def test_equal_prompts_of_one_step_share_their_full_blocks() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt), make_request(1, prompt))
    assert plan_counts(engine) == {0: 100, 1: 4}
    engine.run()
    assert engine.outcomes[0, 1].request.num_cached_tokens == 96


def test_the_next_chat_turn_computes_only_what_is_new() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(250)
    engine.add(make_request(0, prompt, max_tokens=50))
    engine.run()
    turn = prompt + engine.tokens[0, 0]
    assert len(turn) == 300
    engine.add(make_request(1, turn))
    assert plan_counts(engine) == {1: 12}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
def test_overlap_schedules_exactly_the_tokens_that_are_needed(steps_in_flight: int) -> None:
    engine = Engine(make_scheduler(enable_prefix_caching=False), steps_in_flight=steps_in_flight)
    max_tokens = (1, 2, 3, 5)
    for number, count in enumerate(max_tokens):
        engine.add(make_request(number, make_prompt(20 + number), max_tokens=count))
    engine.run()
    expected = sum(20 + number + count - 1 for number, count in enumerate(max_tokens))
    assert engine.scheduler.counters.num_scheduled_tokens == expected
    assert engine.worker.num_tokens_computed == expected
    for number, count in enumerate(max_tokens):
        tokens, reason, _ = engine.end_of(number)
        assert (len(tokens), reason) == (count, FinishReason.LENGTH)


def test_a_shared_prefix_is_read_from_the_blocks_of_the_first() -> None:
    engine = Engine(make_scheduler(num_blocks=11, max_model_len=160))
    prompt = make_prompt(55)
    engine.add(make_request(0, prompt))
    first = engine.plan()
    assert first is not None
    assert first.new_rows[0].block_ids.tolist() == [1, 2, 3, 4]
    engine.add(make_request(1, prompt[:48] + make_prompt(7, seed=1)))
    second = engine.plan()
    assert second is not None
    (row,) = second.new_rows
    assert (row.num_computed_tokens, row.num_cached_tokens) == (48, 48)
    assert row.block_ids.tolist() == [1, 2, 3, 5]


def test_a_request_that_finds_too_few_blocks_changes_nothing() -> None:
    engine = Engine(make_scheduler(num_blocks=11, max_model_len=160))
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt))
    engine.plan()
    before = engine.scheduler.snapshot()
    engine.add(make_request(1, prompt[:48] + make_prompt(100, seed=1)))  # 3 hits, 7 more blocks; 3 are free
    assert plan_counts(engine) == {0: 1}
    after = engine.scheduler.snapshot()
    assert after.num_used_blocks == before.num_used_blocks
    assert after.num_cached_blocks == before.num_cached_blocks
    assert len(after.waiting) == 1


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    engine = Engine(make_scheduler())
    prompt = make_prompt(100)
    for number, salt in enumerate(("a", "a", "b", "")):
        engine.add(make_request(number, prompt, cache_salt=salt))
    assert plan_counts(engine) == {0: 100, 1: 4, 2: 100, 3: 100}
