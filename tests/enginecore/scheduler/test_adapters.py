"""Rows of several adapters, of which a step holds only so many."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.helpers.journals import RecordedRun, replayed
from tests.helpers.scheduling import Clock, Engine, make_prompt, make_request, make_scheduler
from triptych.types.pooling import PoolingParams
from triptych_services.enginecore.scheduler.scheduler import Scheduler


def running_of(scheduler: Scheduler) -> list[int]:
    return [request.number for request in scheduler.snapshot().running]


def test_a_request_that_is_held_back_lets_all_others_pass() -> None:
    engine = Engine(make_scheduler(max_adapters=2, max_num_seqs=8))
    for number, adapter in enumerate(["a", "b", "c", "a", "", "c", "b"]):
        request = make_request(number, make_prompt(9, number), adapter_digest=adapter, max_tokens=5)
        engine.add(request)
    engine.plan()
    assert running_of(engine.scheduler) == [0, 1, 3, 4, 6]
    engine.run()
    assert len(engine.outcomes) == 7


def test_as_many_adapters_run_as_the_worker_applies() -> None:
    engine = Engine(make_scheduler(max_adapters=3, max_num_seqs=8))
    for number in range(40):
        pooling = PoolingParams() if number % 3 == 0 else None
        adapter = str(number * 7 % 11)
        engine.add(
            make_request(
                number,
                make_prompt(9, number),
                adapter_digest=adapter,
                pooling=pooling,
                max_tokens=3,
                priority=number % 4,
                tenant=f"tenant {number % 3}",
            )
        )
    requests = engine.scheduler.requests
    assert requests.adapters()["7"] == 0
    assert requests.adapter_tenants()["7"] == {f"tenant {each}" for each in range(3)}
    most = 0
    while engine.scheduler.has_work:
        assert engine.plan() is not None
        engine.scheduler.check_integrity()
        adapters = {request.content.adapter for request in engine.scheduler.snapshot().running}
        most = max(most, len(adapters))
        engine.finish_step()
    assert most == 3
    assert len(engine.outcomes) == 40
    assert not requests.adapters()


@pytest.mark.parametrize(("policy", "is_served"), [("fcfs", True), ("priority", False)])
def test_an_adapter_that_waits_gets_its_turn_beside_a_stream_of_others(policy: str, is_served: bool) -> None:
    clock, numbers = Clock(), count()
    engine = Engine(make_scheduler(max_adapters=2, max_num_seqs=8, clock=clock, policy=policy))
    done: dict[str, int] = {}
    owners: dict[tuple[int, int], str] = {}

    def ask(adapter: str) -> None:
        number = next(numbers)
        request = make_request(number, make_prompt(5, number), adapter_digest=adapter, max_tokens=4)
        owners[request.session, number] = adapter
        engine.add(request)

    for adapter in ("a", "b", "c", "d", ""):
        ask(adapter)
    for step in range(150):
        clock.now += 0.05
        if step % 2 == 0:  # there is always a row of each that began
            for adapter in ("a", "b", ""):
                ask(adapter)
        assert engine.plan() is not None
        adapters = {request.content.adapter for request in engine.scheduler.snapshot().running}
        assert len(adapters - {""}) <= 2
        engine.finish_step()
        for key in engine.outcomes.keys() & owners.keys():
            done.setdefault(owners.pop(key), step)
    assert {"c", "d"} <= done.keys() if is_served else not {"c", "d"} & done.keys()
    assert not is_served or max(done.values()) < 100  # of 20 steps a second
    engine.run()
    assert not {"c", "d"} & set(owners.values()) or not is_served
    assert len(engine.outcomes) == next(numbers)


def test_adapters_that_left_the_queue_wait_for_no_turn() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(max_adapters=1, max_num_seqs=8, clock=clock))
    for number, adapter in enumerate(["a", "b"]):
        request = make_request(number, make_prompt(5, number), adapter_digest=adapter, max_tokens=60)
        engine.add(request)
    for _ in range(30):
        clock.now += 0.1
        assert engine.plan() is not None
        engine.finish_step()
    assert engine.scheduler.requests.abort(request.session, request.number)
    engine.plan()
    engine.finish_step()
    engine.add(make_request(2, make_prompt(5, 2), adapter_digest="a", max_tokens=5))
    engine.plan()
    assert running_of(engine.scheduler) == [0, 2]


def test_requests_for_an_adapter_that_is_in_no_memory_let_all_others_pass() -> None:
    engine = Engine(make_scheduler(max_adapters=2, max_num_seqs=8))
    for number, adapter in enumerate(["a", "b", "", "a"]):
        engine.add(make_request(number, make_prompt(9, number), adapter_digest=adapter, max_tokens=5))
    engine.scheduler.keep_waiting(["a"])
    engine.plan()
    assert running_of(engine.scheduler) == [1, 2]
    engine.finish_step()
    engine.scheduler.keep_waiting([])
    engine.plan()
    assert running_of(engine.scheduler) == [1, 2, 0, 3]


def test_a_journal_with_adapters_replays_the_same(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, num_blocks=200, max_model_len=200, max_num_seqs=6)
    run.runner.facts = replace(run.runner.facts, max_adapters=2)
    run.start()
    for number in range(20):
        adapter = "abcd"[number % 4]
        sampling = {"max_tokens": 60, "ignore_eos": True}
        run.submit(make_prompt(20, number % 2), sampling=sampling, adapter=adapter, adapter_digest=adapter)
        run.run(6)
        run.clock.now += 0.2  # so that adapters make way for others
        absent = ("ab", "c", "")[number % 3]
        run.engine.adapters.keep_waiting(tuple(absent))
        if number == 7:
            run.engine.adapters.fail("c", "gone")
        if number == 10:
            run.lose_worker()
            run.connect(after_crash=True)
    assert run.engine.adapters.in_use() == set("abcd")
    run.run().engine.close()
    assert run.engine.scheduler is not None
    assert run.engine.scheduler.counters.prefix_hits > 0
    assert replayed(tmp_path).divergence is None


def test_a_prefix_of_one_adapter_is_no_hit_for_another() -> None:
    engine, prompt = Engine(make_scheduler(max_adapters=2)), make_prompt(64)
    for number, (adapter, num_computed) in enumerate([("", 64), ("a", 64), ("b", 64), ("a", 1), ("", 1)]):
        before = engine.worker.num_tokens_computed
        engine.add(make_request(number, prompt, adapter_digest=adapter, max_tokens=1))
        engine.run()
        assert engine.worker.num_tokens_computed - before == num_computed
