"""Admission: accepted and refused requests, and every way to leave early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.scheduling import (
    Clock,
    Engine,
    counts_by_number,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
    tenant_shares,
)
from triptych.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    QueueFull,
)
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.scheduler.step_results import Finished


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=4, max_num_waiting=6, clock=clock)
    engine = Engine(scheduler)
    for number in range(10):
        engine.add(make_request(number, make_prompt(4, seed=number), max_tokens=1 + number))
    with pytest.raises(QueueFull, match=r"max_num_seqs 4 and scheduler\.max_num_waiting 6") as refusal:
        engine.add(make_request(10, make_prompt(4)))
    assert refusal.value.retry_after_s > 0
    engine.plan()
    engine.finish_step()
    assert len(engine.scheduler.snapshot().running) + len(engine.scheduler.snapshot().waiting) == 9
    engine.add(make_request(10, make_prompt(4), max_tokens=1))
    engine.run()
    assert len(engine.outcomes) == 11


def test_without_a_queue_all_rows_can_be_taken() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_waiting=0)
    scheduler.requests.add(make_request(0, [1]))
    scheduler.requests.add(make_request(1, [1]))
    with pytest.raises(QueueFull):
        scheduler.requests.add(make_request(2, [1]))


@pytest.mark.parametrize(
    ("request_args", "config", "field", "words"),
    [
        ({"prompt": make_prompt(64)}, {}, "prompt", ["64", "max_model_len is 64"]),
        ({"prompt": make_prompt(99)}, {}, "prompt", ["99", "max_model_len is 64"]),
        ({"prompt": []}, {}, "prompt", ["0 tokens"]),
        ({"prompt": [1], "emitted": [1, 2], "max_tokens": 2}, {}, "emitted_token_ids", ["3", "limit of 3"]),
        ({"prompt": [1], "priority": 2}, {"policy": "fcfs"}, "priority", ["2", "fcfs"]),
    ],
)
def test_what_can_never_run_is_refused_by_field_value_and_limit(
    request_args: dict[str, Any], config: dict[str, Any], field: str, words: list[str]
) -> None:
    scheduler = make_scheduler(max_model_len=64, **config)
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.requests.add(make_request(0, **request_args))
    (violation,) = refusal.value.violations
    assert violation.field == field
    assert all(word in violation.description for word in words)
    assert not scheduler.has_work
    scheduler.requests.add(make_request(0, make_prompt(63)))


def test_the_longest_prompt_gets_one_token() -> None:
    engine = Engine(make_scheduler(max_model_len=64, num_blocks=5))
    engine.add(make_request(0, make_prompt(63), max_tokens=9))
    engine.run()
    tokens, reason, _ = engine.end_of(0)
    assert (len(tokens), reason) == (1, FinishReason.LENGTH)


def test_a_moved_request_enters_a_full_queue_and_goes_before_new_ones() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_waiting=2)
    engine = Engine(scheduler)
    for number in range(4):
        engine.add(make_request(number, make_prompt(4, seed=number), tenant="greedy"))
    engine.add(make_request(4, make_prompt(4), emitted=[7], tenant="greedy", is_moved=True, max_tokens=8))
    engine.add(make_request(5, make_prompt(4), tenant="greedy", is_moved=True))
    with pytest.raises(QueueFull):
        scheduler.requests.add(make_request(6, make_prompt(4), tenant="greedy", is_moved=True))
    engine.plan()
    assert {request.number for request in scheduler.snapshot().running} == {4, 5}
    assert sum(share.tokens_served for share in tenant_shares(scheduler)) == 0, "it was charged elsewhere"
    scheduler.check_integrity()
    engine.run()
    assert len(engine.outcomes) == 6


@pytest.mark.parametrize("emitted", [(), (7,)])
def test_output_that_a_client_sends_along_gives_no_right(emitted: tuple[int, ...]) -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_waiting=2)
    flood = {"tenant": "flood", "priority": 9, "emitted": emitted, "max_tokens": 9}
    for number in range(4):
        scheduler.requests.add(make_request(number, [1, 2, 3], **flood))
    with pytest.raises(QueueFull):
        scheduler.requests.add(make_request(4, [1, 2, 3], **flood))
    (displaced,) = scheduler.requests.add(make_request(5, [1], tenant="other", priority=9))
    assert displaced.request.number == 3
    (displaced,) = scheduler.requests.add(make_request(6, [1], tenant="urgent", priority=-5))
    assert displaced.request.number == 2
    scheduler.check_integrity()


def test_choices_that_move_one_after_the_other_share_their_name() -> None:
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.requests.add(make_request(number, [1], request_id="mine", is_moved=True))
    scheduler.check_integrity()
    with pytest.raises(DuplicateRequest, match="'mine'"):
        scheduler.requests.add(make_request(3, [1], request_id="mine"))
    for number in range(3):
        scheduler.requests.abort(0, number)
        scheduler.check_integrity()


def test_a_name_in_use_is_refused_until_its_holder_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.requests.add(make_request(0, [1], request_id="mine"))
    with pytest.raises(DuplicateRequest, match="'mine'"):
        scheduler.requests.add(make_request(1, [1], request_id="mine"))
    with pytest.raises(DuplicateRequest, match="number 0"):
        scheduler.requests.add(make_request(0, [1], request_id="yours"))
    scheduler.requests.abort(0, 0)
    scheduler.requests.add(make_request(1, [1], request_id="mine"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_blocks": 4, "max_model_len": 49}, ["49", "3 KV blocks"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 99, "max_model_len": 100},
            ["99", "100"],
        ),
    ],
)
def test_settings_that_could_starve_a_request_stop_the_boot(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make_scheduler(**config)
    assert all(word in error.value.message for word in words)


def test_an_abort_frees_the_blocks_at_once_in_any_state() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=64, policy="fcfs", max_num_seqs=3)
    engine = Engine(scheduler)
    engine.add(make_request(0, make_prompt(31, seed=0), max_tokens=20))
    engine.add(make_request(1, make_prompt(30, seed=1), max_tokens=20))
    engine.add(make_request(2, make_prompt(40, seed=2), max_tokens=20))
    while not scheduler.counters.num_preemptions:
        if len(engine.plans) == 2:
            engine.finish_step()
        engine.plan()
    running, draining, waiting = 0, 1, 2
    assert len(scheduler.snapshot().draining) == 1
    for number in (draining, waiting, running):
        outcome = scheduler.requests.abort(0, number)
        assert isinstance(outcome, Finished)
        assert outcome.reason is FinishReason.ABORT
        engine.note(outcome)
        scheduler.check_integrity()
        assert scheduler.requests.abort(0, number) is None, "it ends once"
    assert (
        len(scheduler.snapshot().running),
        len(scheduler.snapshot().waiting),
        scheduler.snapshot().num_used_blocks,
    ) == (0, 0, 0)
    assert not scheduler.has_work
    while engine.plans:
        assert len(engine.finish_step().token_ids) == 0, "what was in flight is dropped"


def test_a_lost_stream_takes_its_own_requests_only() -> None:
    engine = Engine(make_scheduler(max_num_seqs=3))
    for number in range(4):
        for session in (1, 2):
            prompt = make_prompt(9, seed=number)
            engine.add(make_request(number, prompt, session=session, max_tokens=6))
    engine.plan()
    engine.plan()
    engine.finish_step()
    gone = engine.scheduler.requests.abort_session(1)
    assert [outcome.request.number for outcome in gone] == [0, 1, 2, 3]
    for outcome in gone:
        engine.note(outcome)
    engine.run()
    for number in range(4):
        expected = naive_generation(
            make_prompt(9, seed=number), number, SamplingParams(max_tokens=6), (), 2048
        )
        assert engine.tokens[2, number] == expected[0]
    assert engine.scheduler.requests.abort_session(1) == ()


def test_a_hundred_cancels_leave_the_others_unchanged() -> None:
    engine = Engine(make_scheduler(max_num_seqs=32, max_num_batched_tokens=256, max_num_waiting=200))
    for number in range(200):
        engine.add(make_request(number, make_prompt(1 + number % 50, seed=number), max_tokens=12))
    for number in range(0, 200, 2):
        engine.plan()
        if len(engine.plans) == 2:
            engine.finish_step()
        outcome = engine.scheduler.requests.abort(0, number)
        if outcome is not None:
            engine.note(outcome)
    engine.run()
    assert len(engine.outcomes) == 200
    for number in range(1, 200, 2):
        prompt = make_prompt(1 + number % 50, seed=number)
        expected = naive_generation(prompt, number, SamplingParams(max_tokens=12), (), 2048)
        assert engine.tokens[0, number] == expected[0]
    assert engine.scheduler.snapshot().num_used_blocks == 0


def test_a_request_that_expires_waiting_is_never_computed() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(max_num_seqs=1, clock=clock))
    engine.add(make_request(0, make_prompt(5), max_tokens=3))
    engine.add(make_request(1, make_prompt(6), deadline=clock.now + 5))
    engine.add(make_request(2, make_prompt(7), deadline=clock.now + 9, max_tokens=2))
    engine.plan()
    assert engine.scheduler.requests.expire(clock.now) == ()
    clock.now += 5
    (failed,) = engine.scheduler.requests.expire(clock.now)
    engine.note(failed)
    assert failed.request.number == 1
    assert isinstance(failed.error, DeadlineExceeded)
    assert "waited" in failed.error.message
    assert failed.request.timings.queued_ns == 5 * 10**9
    engine.run()
    assert engine.worker.num_tokens_computed == (5 + 2) + (7 + 1)
    assert engine.scheduler.requests.expire(clock.now + 100) == (), "who has ended does not expire"
    assert engine.scheduler.counters.num_finished["error"] == 1


def test_a_deadline_ends_a_running_request_and_frees_its_blocks() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock))
    engine.add(make_request(0, make_prompt(40), deadline=clock.now + 1))
    engine.plan()
    engine.plan()
    engine.finish_step()
    (failed,) = engine.scheduler.requests.expire(clock.now + 1.5)
    assert "ran" in failed.error.message
    assert engine.scheduler.snapshot().num_used_blocks == 0
    engine.scheduler.check_integrity()
    engine.run()
    assert len(engine.tokens[0, 0]) == 1


def test_clients_that_come_and_go_leave_nothing_in_the_queues() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock)
    scheduler.requests.add(make_request(0, [1]))
    for number in range(1, 2000):
        scheduler.requests.add(make_request(number, [1], deadline=clock.now + number))
        scheduler.requests.abort(0, number)
    assert scheduler.snapshot().num_heap_entries < 300


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equal_requests_in_equal_order_get_equal_plans(policy: str) -> None:
    def counts() -> list[dict[int, int]]:
        engine = Engine(
            make_scheduler(policy=policy, max_num_batched_tokens=32, max_num_seqs=4), steps_in_flight=1
        )
        for number in range(9):
            engine.add(make_request(number, make_prompt(3 + 5 * number, seed=number), max_tokens=7))
        steps = []
        while (plan := engine.plan()) is not None:
            steps.append(counts_by_number(engine.scheduler, plan))
            engine.finish_step()
        return steps

    assert counts() == counts()
