"""Policies and limits are objects: new ones change what is admitted, and nothing else changes for them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest

from tests.helpers.scheduling import Engine, make_prompt, make_request, make_scheduler, request_in, row_counts
from triptych.config import SchedulerConfig
from triptych.config.loader import iter_options
from triptych.types.pooling import PoolingParams, Task
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.admission import limits_of
from triptych_services.enginecore.scheduler.heap import Key, LazyHeap
from triptych_services.enginecore.scheduler.policy import POLICIES, TokenVectorLimit
from triptych_services.enginecore.scheduler.running_rows import RunningRows, Slots
from triptych_services.enginecore.tasks import MAX_VECTOR_BYTES


class ShortestFirst:
    """Admits short prompts first, and preempts the longest request first."""

    has_priorities = False

    def waiting_key(self, request: Request) -> Key:
        return request.num_prompt_tokens, request.arrival

    def running_order(self, running: Sequence[Request]) -> list[Request]:
        return sorted(running, key=self.waiting_key)


@pytest.fixture
def shortest_first(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(POLICIES, "shortest_first", ShortestFirst)
    return "shortest_first"


def admission_order(engine: Engine) -> list[int]:
    order = []
    while (plan := engine.plan()) is not None:
        order += [request_in(engine.scheduler, row.slot).number for row in plan.new_rows]
        engine.finish_step()
    return order


def test_every_policy_is_a_choice_of_the_config() -> None:
    (option,) = (option for option in iter_options() if option.key == "scheduler.policy")
    assert set(option.limits.choices) == POLICIES.keys()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_whether_it_has_priorities(policy: str) -> None:
    assert limits_of(SchedulerConfig(policy=policy)).has_priorities == (policy == "priority")


def test_a_new_policy_orders_the_queue(shortest_first: str) -> None:
    engine = Engine(make_scheduler(policy=shortest_first, max_num_seqs=1), steps_in_flight=1)
    lengths = [30, 10, 20, 10, 5, 40]
    for number, length in enumerate(lengths):
        engine.add(make_request(number, make_prompt(length, number), max_tokens=2))
    assert admission_order(engine) == [4, 1, 3, 2, 0, 5]


def test_a_short_prompt_that_comes_late_goes_first(shortest_first: str) -> None:
    engine = Engine(make_scheduler(policy=shortest_first, max_num_seqs=1), steps_in_flight=1)
    for number, length in enumerate((10, 30, 20, 5)):
        engine.add(make_request(number, make_prompt(length, number), tenant="ab"[number % 2], max_tokens=1))
        if not number:
            engine.plan()
    engine.finish_step()
    assert admission_order(engine) == [3, 2, 1]


def test_a_new_policy_chooses_who_is_preempted(shortest_first: str) -> None:
    engine = Engine(make_scheduler(policy=shortest_first, num_blocks=6, max_model_len=64), steps_in_flight=1)
    engine.add(make_request(0, make_prompt(30, 0), max_tokens=20))
    engine.plan()
    engine.finish_step()
    engine.add(make_request(1, make_prompt(31, 1), max_tokens=20))
    engine.add(make_request(2, make_prompt(3, 2), max_tokens=20))
    while not engine.scheduler.counters.num_preemptions:
        engine.plan()
        engine.finish_step()
    assert [request.number for request in engine.scheduler.snapshot().waiting] == [1]
    engine.run()


def test_a_heap_forgets_members_that_left() -> None:
    heap: LazyHeap[int] = LazyHeap(lambda member: (member,))
    heap.push(0)
    for member in range(1, 2000):
        heap.push(member)
        heap.discard(member)
    assert len(heap) == 1
    assert heap.num_entries < 100
    assert heap.peek() == 0


def test_an_empty_heap_keeps_no_member_alive() -> None:
    heap: LazyHeap[int] = LazyHeap(lambda member: (member,))
    for member in range(10):
        heap.push(member)
    for member in range(10):
        heap.discard(member)
    assert heap.num_entries == 0


def test_a_member_may_return_with_a_lower_key() -> None:
    keys = {"a": 5, "b": 3}
    heap: LazyHeap[str] = LazyHeap(lambda member: (keys[member],))
    heap.push("a")
    heap.push("b")
    heap.discard("a")
    keys["a"] = 1
    heap.push("a")
    assert heap.peek() == "a"
    keys["a"] = 9
    assert heap.peek() == "b"
    heap.discard("b")
    assert heap.peek() == "a"
    heap.discard("a")
    assert heap.peek() is None


class OnePerTenant:
    """Lets one request of each tenant run at a time."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    def group_of(self, request: Request) -> Hashable | None:
        return request.head.tenant or None

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        self.running = {rows.slot_to_request[slot].head.tenant for slot in slots.tolist()}

    def has_room(self, group: Hashable) -> bool:
        return group not in self.running

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        self.running.add(request.head.tenant)


def test_a_new_limit_holds_back_only_what_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "triptych_services.enginecore.scheduler.scheduler.create_limits", lambda *_: (OnePerTenant(),)
    )
    engine = Engine(make_scheduler())
    for number, tenant in enumerate(["a", "a", "b", "", "", "b"]):
        engine.add(make_request(number, make_prompt(9, number), tenant=tenant, max_tokens=3))
    engine.plan()
    running = [request.number for request in engine.scheduler.snapshot().running]
    assert sorted(running) == [0, 2, 3, 4]
    engine.run()
    assert len(engine.outcomes) == 6


def test_held_rows_keep_their_blocks_and_compute_nothing() -> None:
    engine = Engine(make_scheduler(), steps_in_flight=1)
    for number in range(3):
        engine.add(make_request(number, make_prompt(20, number), max_tokens=8))
    engine.plan()
    engine.finish_step()
    scheduler = engine.scheduler
    before = scheduler.snapshot().num_used_blocks
    scheduler.restrict((), may_compute=False)
    engine.add(make_request(3, make_prompt(20, 3), max_tokens=8))
    assert engine.plan() is None
    assert scheduler.snapshot().num_used_blocks == before
    assert all(row_counts(scheduler, request).wanted == 0 for request in scheduler.snapshot().running)
    assert scheduler.requests.abort(0, 0) is not None
    scheduler.check_integrity()
    scheduler.restrict(None)
    engine.run_while_it_can()
    assert [len(engine.tokens[0, number]) for number in (1, 2, 3)] == [8, 8, 8]


def test_a_held_request_does_not_stop_those_behind_it() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), steps_in_flight=1)
    requests = [make_request(number, make_prompt(9, number), max_tokens=1) for number in range(3)]
    engine.add(*requests)
    engine.scheduler.restrict(requests[1:])
    assert admission_order(engine) == [1, 2]
    engine.scheduler.restrict(None)
    assert admission_order(engine) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_a_new_policy_keeps_its_order_whatever_happens(shortest_first: str, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        policy=shortest_first, max_num_seqs=4, num_blocks=30, max_model_len=64, max_num_batched_tokens=64
    )
    engine = Engine(scheduler)  # it checks the scheduler's integrity after each step
    for number in range(150):
        engine.add(
            make_request(number, make_prompt(rng.randint(1, 40)), tenant=rng.choice("ab"), max_tokens=6)
        )
        if rng.random() < 0.2:
            waiting = scheduler.snapshot().waiting
            scheduler.restrict(rng.sample(waiting, len(waiting) // 2) if rng.random() < 0.5 else None)
        if rng.random() < 0.6 and len(engine.plans) < 2:
            engine.plan()
        if rng.random() < 0.6 and engine.plans:
            engine.finish_step()
    scheduler.restrict(None)
    engine.run()
    assert len(engine.outcomes) == 150


def test_vectors_of_tokens_that_end_together_fit_into_one_message() -> None:
    limit = TokenVectorLimit(embedding_size=MAX_VECTOR_BYTES // 4 // 8)
    each, other = (
        make_request(1, make_prompt(8), pooling=PoolingParams(Task.TOKEN_EMBED, dimensions=dimensions))
        for dimensions in (0, 1)
    )
    group = limit.group_of(each)
    assert group is not None
    assert limit.group_of(make_request(2, make_prompt(8))) is None
    assert limit.group_of(make_request(2, make_prompt(8), pooling=PoolingParams())) is None
    for _ in range(2):
        assert limit.has_room(group)
        limit.note_admitted(each, 8)
    limit.note_admitted(make_request(2, make_prompt(8)), 8)
    assert limit.has_room(group)
    limit.note_admitted(other, 8)
    assert not limit.has_room(group), "what follows may be as large as a request's vectors are at most"
