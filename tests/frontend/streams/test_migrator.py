"""When a choice moves, what is submitted for it, and what it takes from its engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.fake_engine import MODEL, NUM_CACHED, FakeEngine, SubmittedChoice, eventually, u32
from tests.helpers.frontend import FrontendCore, answer, raw_request
from tests.helpers.frontend import frontend_core as open_core
from triptych.errors import GenerationLost, InvalidRequest
from triptych.observe.metrics import FrontendMetrics
from triptych.types.outputs import FinishReason, OutputBatch
from triptych.types.submit import EngineWelcome
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MAX_UNANSWERED, MigrationTerms, Migrator

TERMS = MigrationTerms()
NOW = 1_000.0


@asynccontextmanager
async def two_engines(
    moves: MigrationTerms = TERMS, **of_second: Any
) -> AsyncIterator[tuple[FakeEngine, FakeEngine, FrontendCore]]:
    async with (
        FakeEngine(resume_ttl_s=10) as first,
        FakeEngine(engine_id="engine-1", **{"resume_ttl_s": 10, **of_second}) as second,
        open_core(first, second, moves=moves) as core,
    ):
        yield first, second, core


async def submitted_to(engine: FakeEngine, other: FakeEngine, core: FrontendCore, **fields: Any) -> Any:
    """Submit a request while the other engine is not ready, so that it goes to this one."""
    other.set_ready(False, "busy")
    await eventually(lambda: sum(client.is_ready for client in core.router.engines) == 1)
    num_before = len(engine.submitted)
    sampling = {"max_tokens": 10, "seed": 5, **fields.pop("sampling", {})}
    task = asyncio.create_task(answer(core.generator, raw_request([5, 6, 7], sampling=sampling, **fields)))
    choice = await engine.next_submit(num_before)
    await eventually(lambda: core.metric("request_prompt_tokens_count") == num_before + 1)
    other.set_ready(True)
    await eventually(lambda: all(client.is_ready for client in core.router.engines))
    return task, choice


def of_submit(choice: SubmittedChoice) -> tuple[Any, ...]:
    """Return what decides the tokens to come."""
    request = choice.request
    emitted = [column.tolist() for column in request.emitted]
    return (
        request.head.request_id,
        request.prompt_token_ids.tolist(),
        emitted,
        request.seeds.tolist(),
        request.sampling,
    )


async def test_an_engine_that_falls_silent_is_left_and_never_heard_again() -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        first.emit(choice, [70, 71])
        first.is_frozen = True
        moved = await second.next_submit()
        assert moved.request.is_moved
        assert moved.request.num_engine_deaths == 0
        assert choice.request.model_digest == ""
        assert moved.request.model_digest == MODEL.identity.digest
        assert of_submit(moved) == (*of_submit(choice)[:2], [[70, 71]], *of_submit(choice)[3:])
        session = first.hellos[0].session.resume_session
        await eventually(lambda: len(first.hellos) == 2)
        assert first.hellos[1].session.resume_session == session == ""
        assert first.hellos[1].abandoned_session == "session-1"
        first.emit(choice, [99], finish=FinishReason.LENGTH)
        second.emit(moved, [72], finish=FinishReason.LENGTH)
        got = await task
        assert got.token_ids() == [70, 71, 72]
        assert (got.finished.num_moves, got.finished.usage.num_output_tokens) == (1, 3)


async def test_an_engine_that_computes_for_long_and_lives_keeps_its_requests() -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        await eventually(lambda: first.num_beats >= 4)
        assert not second.submitted
        first.emit(choice, [70], finish=FinishReason.STOP)
        assert (await task).token_ids() == [70]


@pytest.mark.thorough
async def test_silence_of_all_engines_moves_nothing() -> None:
    async with two_engines() as (first, second, core):
        task, _ = await submitted_to(first, second, core)
        first.is_frozen = second.is_frozen = True
        await asyncio.sleep(2 * TERMS.after_silence_s)
        assert not second.submitted
        second.is_frozen = False
        await second.next_submit()
        task.cancel()


class WatchedEngine:
    """As much of an engine's client as a look at it needs. Counts what it is asked for and given up for."""

    def __init__(self, *, silent_s: float = 0.0, heard_at: float = NOW) -> None:
        self.welcome = EngineWelcome("engine", True, model=MODEL)
        self.is_ready, self.num_asked = True, 0
        self.given_up: list[str] = []
        self.liveness = SimpleNamespace(heard_at=heard_at)
        self._silent_s = silent_s

    def silent_for(self, now: float) -> float:
        return self._silent_s

    def is_lost(self, now: float, *, after_s: float) -> bool:
        return False

    def send_heartbeat(self, now: float) -> None:
        self.num_asked += 1

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


def look_at(engines: list[WatchedEngine]) -> None:
    router = SimpleNamespace(engines=engines, subscribe=lambda on_change: None)
    metrics = FrontendMetrics.create(CollectorRegistry())
    Migrator(cast(Router, router), metrics, TERMS)._watch_engines(NOW, is_late=False)


def test_of_many_engines_some_are_asked_beside_a_silent_one() -> None:
    quiet = [WatchedEngine(heard_at=0.0) for _ in range(200)]
    silent = WatchedEngine(silent_s=0.4)
    look_at([*quiet, silent])
    assert silent.num_asked == 1
    assert 0 < sum(engine.num_asked for engine in quiet) < 20
    assert not any(engine.given_up for engine in [*quiet, silent])


def test_as_many_engines_are_asked_as_are_silent() -> None:
    """With fewer, a hundred that died together would seem to be more than those that live."""
    quiet = [WatchedEngine(heard_at=0.0) for _ in range(300)]
    silent = [WatchedEngine(silent_s=0.4) for _ in range(100)]
    look_at([*quiet, *silent])
    assert [engine.num_asked for engine in silent] == [1] * 100
    assert sum(engine.num_asked for engine in quiet) == 100


def test_an_engine_that_has_not_said_what_it_serves_is_left_alone() -> None:
    unknown, silent = WatchedEngine(silent_s=1.1), WatchedEngine(silent_s=0.4)
    unknown.welcome = EngineWelcome("engine", False)
    look_at([unknown, silent])
    assert (unknown.num_asked, unknown.given_up, silent.num_asked) == (0, [], 1)


@pytest.mark.parametrize(
    ("num_silent", "silence", "num_given_up"), [(3, 1.1, 3), (4, 1.1, 0), (4, 4.9, 0), (4, 5.1, 4)]
)
def test_more_silent_than_living_engines_are_given_time(
    num_silent: int, silence: float, num_given_up: int
) -> None:
    """`silence`: In terms of `move_after_silence_s`."""
    silent_s = silence * TERMS.after_silence_s
    silent = [WatchedEngine(silent_s=silent_s, heard_at=NOW - silent_s) for _ in range(num_silent)]
    look_at([*silent, *(WatchedEngine() for _ in range(3))])
    assert sum(len(engine.given_up) for engine in silent) == num_given_up


async def test_an_idle_engine_that_is_asked_is_not_taken_for_silent() -> None:
    """It had no reason to speak while others were busy and never asked it for a sign of life."""
    async with two_engines(is_mute=True) as (first, second, core):
        busy, choice = await submitted_to(first, second, core, sampling={"max_tokens": 60})

        async def talk() -> None:
            while True:
                first.emit(choice, [70])
                await asyncio.sleep(0.1)

        talking = asyncio.create_task(talk())
        await asyncio.sleep(1.5 * TERMS.after_silence_s)
        first.set_ready(False, "busy")
        await eventually(lambda: sum(client.is_ready for client in core.router.engines) == 1)
        asked = asyncio.create_task(answer(core.generator, raw_request([5], sampling={"max_tokens": 9})))
        taken = await second.next_submit()
        first.set_ready(True)
        await asyncio.sleep(1.5 * TERMS.after_silence_s)
        second.emit(taken, [71], finish=FinishReason.STOP)
        got = await asked
        assert (got.token_ids(), got.finished.num_moves) == ([71], 0)
        for task in (talking, busy):
            task.cancel()


@pytest.mark.thorough
async def test_a_mover_of_idle_engines_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    watch = Migrator._watch_engines

    def counting(self: Migrator, *args: Any, **options: Any) -> None:
        nonlocal num_looks
        num_looks += 1
        watch(self, *args, **options)

    async def quiet() -> None:
        num_before = -1
        async with asyncio.timeout(60):
            while num_looks != num_before:
                num_before = num_looks
                await asyncio.sleep(0.6)

    monkeypatch.setattr(Migrator, "_watch_engines", counting)
    async with two_engines() as (first, second, core):
        await quiet()
        task, choice = await submitted_to(first, second, core)
        num_before = num_looks
        await eventually(lambda: num_looks >= num_before + 3)
        first.emit(choice, [70], finish=FinishReason.STOP)
        await task
        await quiet()


async def test_an_engine_started_again_says_that_the_one_before_died() -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        first.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await first.die()
        moved = await second.next_submit()
        assert moved.request.num_engine_deaths == 1
        second.emit(moved, range(100, 132))
        second.emit(moved, [], finish=FinishReason.LENGTH)
        assert (await task).token_ids() == [70, *range(100, 132)]


async def test_no_more_than_a_bound_wait_for_one_engine() -> None:
    async with two_engines(is_mute=True) as (first, second, core):
        task, _ = await submitted_to(first, second, core, sampling={"n": 200})
        for choice in first.submitted:
            first.emit(choice, [70 + choice.index % 50])
        await eventually(lambda: core.metric("generation_tokens_total") == 200)
        await first.die()
        await eventually(lambda: len(second.submitted) == MAX_UNANSWERED)
        assert core.migrator.num_waiting == 200 - MAX_UNANSWERED
        request = second.submitted[0].request
        for choice in second.submitted[:MAX_UNANSWERED]:
            second.send(choice, OutputBatch(0, admitted=u32([choice.number])))
        await eventually(lambda: len(second.submitted) == 200)
        assert {choice.seed for choice in second.submitted} == {choice.seed for choice in first.submitted}
        assert request.num_choices > 1, "the choices of one request go together"
        task.cancel()


async def test_a_refusal_sends_it_on_and_another_error_ends_it() -> None:
    async with two_engines(is_mute=True) as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        first.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await first.die()
        moved = await second.next_submit()
        second.fail(moved, "QUEUE_FULL", "full", retry_after_ms=100)
        again = await second.next_submit(1)
        assert of_submit(again) == of_submit(moved)
        second.fail(again, "INVALID_REQUEST", "no", field="emitted_token_ids")
        with pytest.raises(InvalidRequest, match="emitted_token_ids"):
            await task


async def test_what_is_offered_moves_if_another_engine_can_take_it() -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        first.emit(choice, [70])
        first.send(choice, OutputBatch(0, released=u32([choice.number])))
        moved = await second.next_submit()
        await eventually(lambda: first.aborted == [choice.request_id])
        assert moved.request.num_engine_deaths == 0
        second.set_ready(False, "draining")
        first.set_ready(False, "draining")
        await eventually(lambda: not any(client.is_ready for client in core.router.engines))
        second.send(moved, OutputBatch(0, released=u32([moved.number])))
        second.emit(moved, [71], finish=FinishReason.STOP)
        assert (await task).token_ids() == [70, 71]
        assert not second.aborted


async def test_a_stop_while_nothing_computes_ends_with_what_there_is() -> None:
    async with FakeEngine(resume_ttl_s=0.0) as engine, open_core(engine, moves=TERMS) as core:
        task = asyncio.create_task(
            answer(core.generator, raw_request([5], sampling={"max_tokens": 9}, request_id="mine"))
        )
        choice = await engine.next_submit()
        engine.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await engine.die()
        await eventually(lambda: core.migrator.num_waiting == 1)
        await eventually(lambda: core.metric("choices_waiting_for_engine") == 1)
        await eventually(lambda: core.metric("oldest_choice_waiting_for_engine_seconds") > 0)
        assert await core.generator.abort(["mine"]) == ["mine"]
        got = await task
        assert got.token_ids() == [70]
        assert got.deltas[-1].finish_reason is FinishReason.ABORT
        assert core.migrator.num_waiting == 0
        await eventually(lambda: core.metric("choices_waiting_for_engine") == 0)


async def test_new_requests_go_to_any_numerics() -> None:
    other = replace(MODEL, identity=replace(MODEL.identity, numerics="other"))
    async with two_engines(model=other) as (first, second, core):
        tasks = [
            asyncio.create_task(answer(core.generator, raw_request([5], sampling={"max_tokens": 9})))
            for _ in range(2)
        ]
        for engine in (first, second):
            engine.emit(await engine.next_submit(), [70], finish=FinishReason.STOP)
        assert [got.token_ids() for got in await asyncio.gather(*tasks)] == [[70]] * 2


@pytest.mark.parametrize(
    "of_second",
    [
        {"max_choices": 11},
        {"model": replace(MODEL, max_model_len=14)},
        {"model": replace(MODEL, max_model_len=8192)},
    ],
)
async def test_a_request_moves_where_the_rest_of_it_fits(of_second: dict[str, Any]) -> None:
    """Engines of other limits compute the same tokens."""
    async with two_engines(**of_second) as (first, second, core):
        task, choice = await submitted_to(first, second, core)  # 3 tokens of prompt, 10 of output
        first.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await first.die()
        second.emit(await second.next_submit(), [71], finish=FinishReason.STOP)
        got = await task
        assert got.token_ids() == [70, 71]
        assert got.finished.is_exact


async def test_a_request_that_fits_nowhere_says_why() -> None:
    short = replace(MODEL, max_model_len=12)
    async with two_engines(replace(TERMS, timeout_s=0.2), model=short) as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        first.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await first.die()
        why = "engine-1: max_model_len: 12 is below the 13 tokens that the request may have"
        with pytest.raises(GenerationLost, match=why):
            await task
        assert not second.submitted


async def test_those_who_wait_for_one_thing_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand streams that no engine may take now cost as much as one."""
    num_looks = 0
    look = Migrator._find_candidates

    def counting(self: Migrator, *args: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(self, *args)

    other = replace(MODEL, identity=replace(MODEL.identity, numerics="other"))
    async with two_engines(model=other) as (first, second, core):
        task, _ = await submitted_to(first, second, core, sampling={"n": 40, "temperature": 1.0})
        for choice in first.submitted:
            first.emit(choice, [70])
        await eventually(lambda: core.metric("generation_tokens_total") == 40)
        await first.die()
        core.router.engines[0].give_up("it is gone")
        await eventually(lambda: core.migrator.num_waiting == 40)
        monkeypatch.setattr(Migrator, "_find_candidates", counting)
        for route in core.migrator._waiting:
            route.not_before = 0.0
        assert core.migrator._next_groups() == []
        assert num_looks == 1
        task.cancel()


@pytest.mark.parametrize("says_first", [True, False], ids=["", "version before"])
async def test_usage_has_the_cached_tokens_of_the_first_engine(says_first: bool) -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        assert choice.request.cached_tokens == ()
        first.emit(choice, [70], first_cached_tokens=2 if says_first else None)
        await eventually(lambda: core.metric("generation_tokens_total") == 1)
        await first.die()
        moved = await second.next_submit()
        assert moved.request.cached_tokens == ((2,) if says_first else (None,))
        second.emit(moved, [71], first_cached_tokens=NUM_CACHED, finish=FinishReason.LENGTH)
        got = await task
        assert got.finished.num_moves == 1
        assert got.finished.usage.num_cached_tokens == (2 if says_first else NUM_CACHED)


async def test_counts_of_guesses_go_to_the_next_engine() -> None:
    async with two_engines() as (first, second, core):
        task, choice = await submitted_to(first, second, core)
        assert choice.request.guesses is None
        for counts in ((1, 0), (2, 3)):
            first.emit(choice, [70, 70], guesses=counts)
        await eventually(lambda: core.metric("generation_tokens_total") == 4)
        await first.die()
        moved = await second.next_submit()
        assert moved.request.guesses is not None
        assert moved.request.guesses.by_number == {moved.number: (2, 3)}
        second.emit(moved, [71], finish=FinishReason.LENGTH)
        await task


async def test_usage_after_a_move_without_output_is_of_the_second_engine() -> None:
    async with two_engines() as (first, second, core):
        task, _ = await submitted_to(first, second, core)
        await first.die()
        moved = await second.next_submit()
        assert moved.request.cached_tokens == (None,)
        second.emit(moved, [71], first_cached_tokens=3)
        second.emit(moved, [72], finish=FinishReason.LENGTH)
        assert (await task).finished.usage.num_cached_tokens == 3
