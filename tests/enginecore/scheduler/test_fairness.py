"""Fair shares between tenants: who goes first, what is charged, and what is remembered."""

from __future__ import annotations

import random

import pytest

from tests.helpers.scheduling import (
    Engine,
    make_prompt,
    make_request,
    make_scheduler,
    request_in,
    tenant_shares,
)
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.fairness import OUTPUT_WEIGHT
from triptych_services.enginecore.scheduler.scheduler import Scheduler


def served_to(scheduler: Scheduler, tenant: str, priority: int = 0) -> int:
    """Return the counter of a tenant that is known."""
    shares = {(share.priority, share.tenant): share for share in tenant_shares(scheduler)}
    return shares[priority, tenant].tokens_served


def known_tenants(scheduler: Scheduler) -> list[str]:
    return sorted(share.tenant for share in tenant_shares(scheduler))


def admission_order(engine: Engine) -> list[int]:
    """Numbers in the order in which they were first planned, of an engine that runs to the end."""
    order: list[int] = []
    for _ in range(100_000):
        while len(engine.plans) < engine.steps_in_flight and (plan := engine.plan()) is not None:
            order += [request_in(engine.scheduler, row.slot).number for row in plan.new_rows]
        if not engine.plans:
            return list(dict.fromkeys(order))
        engine.finish_step()
    raise AssertionError("it does not end")


def add(engine: Engine, number: int, tenant: str, length: int = 10, **kwargs: object) -> Request:
    request = make_request(number, make_prompt(length, seed=number), tenant=tenant, **kwargs)  # type: ignore[arg-type]
    engine.add(request)
    return request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_tenant_is_served_first_come_first_served(policy: str) -> None:
    engine = Engine(
        make_scheduler(
            max_num_seqs=3, policy=policy, max_num_batched_tokens=64, num_blocks=40, max_model_len=256
        )
    )
    rng = random.Random(0)
    for number in range(60):
        add(engine, number, "a", rng.randint(1, 90), max_tokens=rng.randint(1, 30))
    assert admission_order(engine) == list(range(60))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_tenant_that_floods_the_queue_delays_only_itself(policy: str) -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, policy=policy))
    for number in range(40):
        add(engine, number, "flood", max_tokens=4)
    engine.plan()
    for number in (40, 41, 42):
        add(engine, number, "calm", max_tokens=4)
    assert admission_order(engine)[:6] == [40, 1, 41, 2, 42, 3]


def test_equal_service_goes_by_arrival() -> None:
    engine = Engine(
        make_scheduler(max_num_seqs=1), steps_in_flight=1
    )  # a token in flight is charged when it is there
    for number in range(9):
        add(engine, number, "abc"[number % 3], max_tokens=1)
    assert admission_order(engine) == list(range(9))


def test_idling_saves_nothing_up() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    add(engine, 0, "late", max_tokens=1)
    for number in range(1, 40):
        add(engine, number, "busy", max_tokens=4)
    while served_to(engine.scheduler, "busy") < 10 * (10 + 4 * OUTPUT_WEIGHT):
        engine.plan()
        engine.finish_step()
    waiting = sorted(request.number for request in engine.scheduler.snapshot().waiting)
    for number in range(40, 50):
        add(engine, number, "late", max_tokens=4)
    order = admission_order(engine)
    first = order[: order.index(waiting[0]) + 8]
    assert 3 <= sum(number >= 40 for number in first) <= 6, "they take turns; it catches nothing up"


def test_a_counter_is_remembered_while_its_tenant_idles() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, enable_prefix_caching=False), steps_in_flight=1)
    for number in range(30):
        add(engine, number, "many", 10, max_tokens=1)
    add(engine, 30, "large", 100, max_tokens=1)
    while (0, 30) not in engine.outcomes:
        engine.plan()
        engine.finish_step()
    done = len(engine.outcomes)
    add(engine, 31, "large", 10, max_tokens=1)
    order = admission_order(engine)
    assert order.index(31) == 102 // 12 - done + 2, "it waits until the others have had as much"


def test_counters_hold_prompts_once_and_outputs_weighted() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4))
    prompt = make_prompt(100)
    engine.add(make_request(0, prompt, tenant="a", max_tokens=7))
    engine.plan()
    engine.add(make_request(1, prompt, tenant="b", max_tokens=200))
    engine.plan()
    assert served_to(engine.scheduler, "a") == 100
    assert served_to(engine.scheduler, "b") == 100 + 4, (
        "lifted to the only other, and charged what no cache held"
    )
    for _ in range(20):
        engine.finish_step()
        engine.plan()
    assert len(engine.end_of(0)[0]) == 7
    assert served_to(engine.scheduler, "b") == 104 + OUTPUT_WEIGHT * len(engine.tokens[0, 1])


def test_preemptions_are_not_charged_and_every_token_is_once() -> None:
    engine = Engine(
        make_scheduler(num_blocks=8, max_model_len=96, max_num_seqs=4, policy="fcfs"), steps_in_flight=3
    )
    add(engine, 0, "watcher")  # keeps the level alive, and so the counters
    for number in range(1, 7):
        add(engine, number, "ab"[number % 2], 20 + number, max_tokens=30)
    engine.scheduler.restrict([request for request in engine.scheduler.snapshot().requests if request.number])
    engine.run_while_it_can()
    assert engine.scheduler.counters.num_preemptions > 0
    assert len(engine.outcomes) == 6
    assert served_to(engine.scheduler, "a") == 22 + 24 + 26 + OUTPUT_WEIGHT * 3 * 30
    assert served_to(engine.scheduler, "b") == 21 + 23 + 25 + OUTPUT_WEIGHT * 3 * 30


@pytest.mark.thorough
def test_backlogged_tenants_stay_within_the_bound_of_the_paper() -> None:
    """Lemma 4.3: counters of tenants that wait differ by at most max(w_p * longest prompt, w_q * tokens that
    may be in memory)."""
    num_seqs, longest, most_output = 4, 60, 40
    engine = Engine(make_scheduler(max_num_seqs=num_seqs, enable_prefix_caching=False))
    rng = random.Random(1)
    for number in range(240):
        tenant = "abc"[number % 3]
        length = {"a": longest, "b": 3, "c": rng.randint(1, longest)}[tenant]
        max_tokens = {"a": 1, "b": most_output, "c": rng.randint(1, most_output)}[tenant]
        add(engine, number, tenant, length, max_tokens=max_tokens)
    bound = max(longest, OUTPUT_WEIGHT * num_seqs * (longest + most_output))
    widest = 0
    for _ in range(400):
        while len(engine.plans) < 2:
            engine.plan()
        engine.finish_step()
        waiting = {request.head.tenant for request in engine.scheduler.snapshot().waiting}
        served = [served_to(engine.scheduler, tenant) for tenant in waiting]
        widest = max(widest, max(served) - min(served))
    assert len(waiting) == 3
    assert 0 < widest <= bound
    assert min(served) > 2 * bound, "long enough to tell"


def test_a_preempted_request_of_a_greedy_tenant_goes_first() -> None:
    engine = Engine(
        make_scheduler(num_blocks=6, max_model_len=64, max_num_seqs=2, policy="fcfs"), steps_in_flight=1
    )
    add(engine, 0, "a", 30, max_tokens=30)
    add(engine, 1, "greedy", 31, max_tokens=30)
    engine.plan()
    add(engine, 2, "modest", 1, max_tokens=1)
    while not engine.scheduler.counters.num_preemptions:
        engine.finish_step()
        engine.plan()
    assert admission_order(engine) == [1, 2]
    assert [number for _, number in engine.outcomes] == [0, 2, 1]


def test_requests_of_a_lost_worker_go_first_in_their_order() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4))
    for number in range(8):
        add(engine, number, "ab"[number % 2], 10 + number, max_tokens=9)
    engine.plan()
    engine.lose_worker()
    plan = engine.plan()
    assert plan is not None
    assert [request_in(engine.scheduler, row.slot).number for row in plan.new_rows] == [0, 1, 2, 3]


def test_shares_of_one_priority_do_not_count_in_another() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), steps_in_flight=1)
    for number in range(5):
        add(engine, number, "a", 50, priority=0, max_tokens=2)
    for number, tenant in enumerate("abab", 5):
        add(engine, number, tenant, 5, priority=1, max_tokens=1)
    assert admission_order(engine) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_shares_outlive_the_worker() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, max_model_len=256))
    for number in range(3):
        add(engine, number, "a", 100, max_tokens=2)
    for number in range(3, 9):
        add(engine, number, "b", 10, max_tokens=2)
    engine.plan()
    before = served_to(engine.scheduler, "a")
    successor = make_scheduler(max_num_seqs=1, max_model_len=256, num_blocks=50)
    assert successor.adopt(engine.scheduler) == ()
    assert served_to(successor, "a") == before
    engine = Engine(successor, tokens=engine.tokens)
    assert admission_order(engine) == [0, 3, 4, 5, 6, 7, 8, 1, 2]


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    add(engine, 0, "stays", max_tokens=2000)
    add(engine, 1, "waits", max_tokens=2000)
    add(engine, 2, "waits", max_tokens=2000)
    for number in range(3, 3000):
        add(engine, number, f"tenant {number}", max_tokens=2)
        engine.scheduler.requests.abort(0, number)
    shares = tenant_shares(engine.scheduler)
    assert len(shares) <= 3, "a tenant that was served no more than others is forgotten at once"
    assert engine.scheduler.snapshot().num_heap_entries < 400
    assert all(share.index < 8 for share in shares)


def test_the_number_of_idle_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.enginecore.scheduler.fairness._MAX_IDLE", 5)
    engine = Engine(make_scheduler(max_num_seqs=1), steps_in_flight=1)
    add(engine, 0, "starved", 10, priority=0, max_tokens=1)
    engine.scheduler.restrict([])
    for number in range(1, 30):
        request = add(engine, number, f"tenant {number}", 10 + number, max_tokens=1)
        engine.scheduler.restrict([request])
        engine.plan()
        engine.finish_step()
    assert known_tenants(engine.scheduler) == sorted(
        ["starved", *(f"tenant {number}" for number in range(25, 30))]
    )


def test_without_requests_a_level_forgets_everything() -> None:
    engine = Engine(make_scheduler())
    for number in range(20):
        add(engine, number, f"tenant {number % 5}", priority=number % 3, max_tokens=3)
    engine.run()
    assert tenant_shares(engine.scheduler) == []


def test_running_requests_are_charged_before_each_choice() -> None:
    engine = Engine(make_scheduler(max_num_seqs=3), steps_in_flight=1)
    for number, (tenant, length) in enumerate((("a", 10), ("a", 10), ("b", 40), ("a", 10), ("b", 10))):
        add(engine, number, tenant, length, max_tokens=500)
    for _ in range(20):
        engine.plan()
        engine.finish_step()
    assert engine.scheduler.requests.abort(0, 2) is not None
    plan = engine.plan()
    assert plan is not None
    (row,) = plan.new_rows
    assert request_in(engine.scheduler, row.slot).head.tenant == "b", "two of the other's have run for long"


def test_a_new_tenant_starts_at_the_last_counter_that_waited() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2), steps_in_flight=1)
    add(engine, 0, "a", 500, max_tokens=12)
    engine.plan()
    add(engine, 1, "gone", 300, max_tokens=1)
    while (0, 1) not in engine.outcomes:
        engine.finish_step()
        engine.plan()
    assert known_tenants(engine.scheduler) == ["a"]
    engine.scheduler.restrict([])
    for number, tenant in ((2, "new"), (3, "a"), (4, "new")):
        add(engine, number, tenant, max_tokens=1)
    engine.scheduler.restrict(None)
    assert admission_order(engine) == [2, 3, 4]


def test_a_new_tenant_is_raised_to_the_least_served() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), steps_in_flight=1)
    for number in range(3):
        add(engine, number, "a", max_tokens=100)
    for _ in range(30):
        engine.plan()
        engine.finish_step()
    for number in range(3, 6):
        add(engine, number, "new", 3, max_tokens=1)
    assert served_to(engine.scheduler, "new") == 10 + 30 * OUTPUT_WEIGHT
    assert served_to(engine.scheduler, "a") == 10 + 30 * OUTPUT_WEIGHT
