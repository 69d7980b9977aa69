"""The engine's prediction of the first token, compared with a worker whose steps take a known time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.helpers.scheduling import Clock, Engine, make_prompt, make_request, make_scheduler, predict_wait_s
from triptych.errors import DeadlineUnreachable, QueueFull
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.forecast import EndingPace
from triptych_services.enginecore.scheduler.step_results import StepOutput

STEP_S, TOKEN_S = 0.010, 0.0001
"""Time of a step, and of each token in it."""


@dataclass
class TimedEngine(Engine):
    """A worker that takes STEP_S + TOKEN_S per token."""

    clock: Clock | None = None

    def finish_step(self, failing_slots: tuple[int, ...] = ()) -> StepOutput:  # type: ignore[override]
        assert self.clock is not None
        self.clock.now += STEP_S + TOKEN_S * self.plans[0].num_tokens
        return super().finish_step(failing_slots)


def make_engine(steps_in_flight: int = 2, **config: object) -> TimedEngine:
    clock = Clock()
    scheduler = make_scheduler(clock=clock, enable_prefix_caching=False, **config)  # type: ignore[arg-type]
    return TimedEngine(scheduler, steps_in_flight=steps_in_flight, clock=clock)


def warm_up(engine: TimedEngine) -> None:
    """Measure steps of many sizes, and how long requests run."""
    for number, length in enumerate((500, 30, 100, 9, 250, 60) * 4, 10_000):
        engine.add(make_request(number, make_prompt(length), max_tokens=20))
    engine.run()


def request_of(
    engine: TimedEngine, number: int, length: int, in_s: float | None = None, **kwargs: object
) -> Request:
    assert engine.clock is not None
    deadline = None if in_s is None else engine.clock.now + in_s
    return make_request(number, make_prompt(length, seed=number), deadline=deadline, **kwargs)  # type: ignore[arg-type]


def prefill_bound(engine: TimedEngine) -> Request:
    for number in range(12):
        engine.add(request_of(engine, number, 400, max_tokens=2))
    engine.plan()
    engine.finish_step()
    return request_of(engine, 100, 300, max_tokens=2)


def row_bound(engine: TimedEngine) -> Request:
    for number in range(64):
        engine.add(request_of(engine, number, 10, max_tokens=20))
    engine.plan()
    engine.finish_step()
    return request_of(engine, 100, 10, max_tokens=2)


def behind_a_long_prompt(engine: TimedEngine) -> Request:
    engine.add(request_of(engine, 0, 2000, max_tokens=2))
    engine.plan()
    engine.finish_step()
    return request_of(engine, 100, 100, max_tokens=2)


def urgent(engine: TimedEngine) -> Request:
    for number in range(12):
        engine.add(request_of(engine, number, 400, priority=number % 3, max_tokens=2))
    return request_of(engine, 100, 300, priority=1, max_tokens=2)


def calm_beside_a_flood(engine: TimedEngine) -> Request:
    for number in range(50):
        engine.add(request_of(engine, number, 200, tenant="flood", max_tokens=20))
    engine.plan()
    engine.finish_step()
    return request_of(engine, 100, 200, tenant="calm", max_tokens=2)


def short_of_blocks(engine: TimedEngine) -> Request:
    for number in range(20):
        engine.add(request_of(engine, number, 300, max_tokens=20))
    for _ in range(4):
        engine.plan()
        engine.finish_step()
    return request_of(engine, 100, 100, max_tokens=2)


def more_of_the_flood(engine: TimedEngine) -> Request:
    calm_beside_a_flood(engine)
    return request_of(engine, 100, 200, tenant="flood", max_tokens=2)


SCENES = [
    prefill_bound,
    behind_a_long_prompt,
    row_bound,
    short_of_blocks,
    urgent,
    calm_beside_a_flood,
    more_of_the_flood,
]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_the_first_token_comes_about_when_predicted(
    scene: Callable[[TimedEngine], Request], steps_in_flight: int
) -> None:
    blocks = {"num_blocks": 81, "max_model_len": 1024} if scene is short_of_blocks else {}
    engine = make_engine(steps_in_flight, max_num_batched_tokens=512, max_num_seqs=16, **blocks)
    warm_up(engine)
    request = scene(engine)
    predicted = predict_wait_s(engine.scheduler, request)
    engine.add(request)
    engine.run()
    assert request.first_token_at is not None
    actual = request.first_token_at - request.queued_at
    assert predicted is not None
    # A row is free for others while its last tokens are in flight; the forecast counts it until they are there.
    most = 1.4 if steps_in_flight == 1 else 1.5
    assert 0.6 < predicted / actual < most, f"{predicted} s predicted, {actual} s it took"


def test_chunks_of_a_long_prompt_take_a_step_each() -> None:
    engine = make_engine(1, max_num_batched_tokens=512, long_prefill_token_threshold=50)
    warm_up(engine)
    engine.add(request_of(engine, 0, 10))
    request = request_of(engine, 1, 1000, max_tokens=1)
    predicted = predict_wait_s(engine.scheduler, request)
    engine.add(request)
    while (0, 1) not in engine.outcomes:
        engine.plan()
        engine.finish_step()
    assert request.first_token_at is not None
    assert predicted == pytest.approx(request.first_token_at - request.queued_at, rel=0.1)


def test_an_unreachable_deadline_is_refused_with_the_wait() -> None:
    engine = make_engine(max_num_batched_tokens=512)
    warm_up(engine)
    for number in range(40):
        engine.add(request_of(engine, number, 500, max_tokens=2))
    wait_s = predict_wait_s(engine.scheduler, request_of(engine, 100, 50))
    assert wait_s is not None
    assert wait_s > 40 * 500 * TOKEN_S
    with pytest.raises(DeadlineUnreachable, match=rf"in {wait_s:.2f} s .* in 1\.50 s") as refusal:
        engine.scheduler.requests.add(request_of(engine, 100, 50, in_s=1.5))
    assert refusal.value.retry_after_s == wait_s
    assert len(engine.scheduler.snapshot().waiting) == 40
    engine.scheduler.check_integrity()
    engine.add(request_of(engine, 100, 50, in_s=wait_s + 0.01))
    engine.add(request_of(engine, 101, 50))
    engine.add(request_of(engine, 102, 50, in_s=1.5, is_moved=True))


def test_nothing_is_refused_before_sixteen_steps_are_measured() -> None:
    engine = make_engine(steps_in_flight=1, max_num_batched_tokens=512)
    for number in range(40):
        engine.add(request_of(engine, number, 500, max_tokens=2))
    for step in range(16):
        engine.add(request_of(engine, 100 + step, 5, in_s=0.05))
        engine.plan()
        engine.finish_step()
    with pytest.raises(DeadlineUnreachable):
        engine.scheduler.requests.add(request_of(engine, 200, 5, in_s=0.05))


def test_an_idle_engine_tries_whatever_comes() -> None:
    engine = make_engine(max_num_batched_tokens=512)
    warm_up(engine)
    engine.add(request_of(engine, 0, 2000, in_s=0.001))
    with pytest.raises(DeadlineUnreachable):
        engine.scheduler.requests.add(request_of(engine, 1, 2000, in_s=0.001))


def test_a_request_that_comes_expired_ends_as_expired() -> None:
    engine = make_engine(max_num_batched_tokens=512)
    warm_up(engine)
    engine.add(request_of(engine, 0, 2000))
    engine.add(request_of(engine, 1, 2000, in_s=0.0))
    assert engine.clock is not None
    (failed,) = engine.scheduler.requests.expire(engine.clock.now)
    assert failed.request.number == 1


def test_prompts_ahead_count_without_what_the_cache_holds() -> None:
    clock = Clock()
    engine = TimedEngine(make_scheduler(clock=clock, max_num_batched_tokens=512, max_num_seqs=4), clock=clock)
    prompt = make_prompt(500)
    for number in range(200):
        engine.add(make_request(number, prompt, max_tokens=2))
        engine.run()
    for number in range(200, 260):
        engine.add(make_request(number, prompt, max_tokens=2))
    predicted = predict_wait_s(engine.scheduler, make_request(300, prompt))
    assert predicted is not None
    assert predicted < 61 * 500 * TOKEN_S / 4, "each computes 4 of its 500 tokens"


def test_a_new_worker_is_judged_by_what_the_last_one_did() -> None:
    engine = make_engine(max_num_batched_tokens=512)
    warm_up(engine)
    assert engine.clock is not None
    successor = make_scheduler(clock=engine.clock, max_num_batched_tokens=512)
    successor.adopt(engine.scheduler)
    successor.requests.add(request_of(engine, 0, 2000))
    with pytest.raises(DeadlineUnreachable):
        successor.requests.add(request_of(engine, 1, 2000, in_s=0.001))


def test_refused_clients_come_back_one_after_the_other() -> None:
    pace = EndingPace()
    assert pace.interval_s(4) is None
    assert pace.refuse(4) == 1.0, "nothing measured yet"
    for _ in range(3):
        pace.note_ending(8.0)
    assert [pace.refuse(4) for _ in range(3)] == [2.0, 4.0, 6.0]
    pace.note_ending(None)
    assert pace.refuse(4) == 2.0, "who never ran says nothing of how long others do"
    assert [pace.refuse(4) for _ in range(40)][-1] == 30.0, "the wait is bounded"


def test_an_idle_hour_does_not_change_the_pace() -> None:
    clock = Clock()
    engine = TimedEngine(make_scheduler(max_num_seqs=1, max_num_waiting=0, clock=clock), clock=clock)
    for number in range(3):
        engine.add(make_request(number, make_prompt(5), max_tokens=20))
        engine.run()
        clock.now += 3600
    engine.add(make_request(3, make_prompt(5)))
    with pytest.raises(QueueFull) as refusal:
        engine.scheduler.requests.add(make_request(4, make_prompt(5)))
    assert refusal.value.retry_after_s < 1.0
