"""Full queues: what a frontend refuses by itself, and where it tries another engine first."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.helpers.fake_engine import FakeEngine, SubmittedChoice
from tests.helpers.frontend import FrontendCore, answer, collect, frontend_core, raw_request
from tests.helpers.scheduling import Clock
from triptych.errors import InvalidRequest, QueueFull
from triptych.types.outputs import OutputBatch, RequestFailure
from triptych_services.frontend.engines.session import QueueView
from triptych_services.frontend.routing.policy import RoundRobin


def seeded(choice: SubmittedChoice) -> list[int]:
    return [97 + choice.seed % 26] * 100


def batch(
    num_free_places: int | None = None, admitted: tuple[int, ...] = (), refused: tuple[int, ...] = ()
) -> OutputBatch:
    failures = tuple(RequestFailure(number, "QUEUE_FULL", "full", retry_after_ms=2000) for number in refused)
    return OutputBatch(
        1, admitted=np.array(admitted, np.uint32), failures=failures, num_free_places=num_free_places
    )


def test_only_what_a_full_queue_has_refused_is_refused() -> None:
    view = QueueView(Clock())
    assert view.refuses(0, "a") is None  # nothing is known
    view.note_submitted([1], 0, "a")
    view.note_batch(batch(0, refused=(1,)))
    refusal_s = view.refuses(0, "a")
    assert refusal_s is not None
    assert 2.0 <= refusal_s <= 4.0
    assert view.refuses(0, "b") is None
    assert view.refuses(-1, "a") is None


def test_room_lets_as_many_through_as_there_are_places() -> None:
    view = QueueView(Clock())
    view.note_submitted([1], 0, "a")
    view.note_batch(batch(0, refused=(1,)))
    view.note_batch(batch(2))
    for number in (2, 3):
        assert view.refuses(0, "a") is None
        view.note_submitted([number], 0, "a")
    assert view.refuses(0, "a") is not None  # both places are asked for
    view.note_aborted(3)
    assert view.refuses(0, "a") is None
    view.note_batch(batch(1, admitted=(2,)))
    assert view.refuses(0, "a") is None


def test_a_refusal_is_forgotten_after_a_second() -> None:
    clock = Clock()
    view = QueueView(clock)
    view.note_submitted([1], 0, "a")
    view.note_batch(batch(0, refused=(1,)))
    clock.now += 1.1
    assert view.refuses(0, "a") is None


def test_a_request_that_had_to_make_room_says_nothing_of_its_tenant() -> None:
    view = QueueView(Clock())
    view.note_submitted([1], 0, "a")
    view.note_batch(batch(1, admitted=(1,)))
    view.note_batch(batch(0, refused=(1,)))
    assert view.refuses(0, "a") is None


async def refuse_next(core: FrontendCore, engine: FakeEngine) -> None:
    """Let an engine refuse a request, with no room left."""
    task = asyncio.create_task(collect(core.generator, raw_request()))
    submit = await engine.next_submit(len(engine.submitted))
    failure = RequestFailure(submit.number, "QUEUE_FULL", "full", retry_after_ms=1000)
    engine.send(submit, OutputBatch(0, failures=(failure,), num_free_places=0))
    with pytest.raises(QueueFull):
        await task


async def test_a_full_engine_is_asked_once_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.frontend.routing.load._REMEMBERED_S", 60.0)
    async with FakeEngine(is_mute=True) as engine, frontend_core(engine) as core:
        await refuse_next(core, engine)
        for _ in range(5):
            with pytest.raises(QueueFull, match="the queue of engine-0 is full") as refusal:
                await answer(core.generator, raw_request())
            assert 1.0 <= refusal.value.retry_after_s <= 2.0
        assert len(engine.submitted) == 1


async def test_the_next_engine_is_tried_before_the_client_is_told() -> None:
    full, free = FakeEngine(is_mute=True), FakeEngine(seeded, engine_id="engine-1")
    async with full, free, frontend_core(full, free, policy=RoundRobin()) as core:
        task = asyncio.create_task(answer(core.generator, raw_request(sampling={"n": 3, "temperature": 1.0})))
        submits = [await full.next_submit(index) for index in range(3)]
        failures = tuple(RequestFailure(submit.number, "QUEUE_FULL", "full", "", 100) for submit in submits)
        full.send(submits[0], OutputBatch(0, failures=failures))
        got = await task
        assert len(got.deltas) >= 3
        assert {submit.number for submit in free.submitted} == {1, 2, 3}


async def test_more_choices_than_an_engine_holds_are_refused_for_good() -> None:
    async with FakeEngine(seeded, max_choices=8) as engine, frontend_core(engine) as core:
        with pytest.raises(InvalidRequest, match="9 choices are above the limit 8"):
            await answer(core.generator, raw_request(sampling={"n": 9, "temperature": 1.0}))
        await answer(core.generator, raw_request(sampling={"n": 8, "temperature": 1.0}))
