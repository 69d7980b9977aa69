"""Each token comes once, whatever happens to the step stream, and nothing is computed twice without need."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    DEADLINE_S,
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    make_executor,
)
from tests.helpers.step_relay import Cut, StepRelay
from triptych.errors import EngineFailure, StaleEpoch, WorkerHeld
from triptych.types.outputs import RequestFailure
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan

NUM_REQUESTS = 12
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "max_tokens": 24}


@asynccontextmanager
async def relayed_stack(
    resume_ttl_s: float = 60.0,
) -> AsyncIterator[tuple[WorkerStack, StepRelay, EngineStack, FakeFrontend]]:
    config = make_config()
    config = replace(config, engine=replace(config.engine, resume_ttl_s=resume_ttl_s))
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    relay = StepRelay(worker.port)
    await relay.start()
    engine_config = replace(config.engine, worker_address=f"127.0.0.1:{relay.port}")
    engine = EngineStack(replace(config, engine=engine_config))
    await engine.start()
    frontend = FakeFrontend(engine.address)
    await frontend.start()
    try:
        await frontend.wait_ready()
        yield worker, relay, engine, frontend
    finally:
        await frontend.stop()
        await engine.stop()
        await relay.stop()
        await worker.stop()


def sampling_of(number: int) -> dict[str, Any]:
    return GREEDY if number % 2 else SEEDED


def expected(number: int) -> list[int]:
    prompt = make_prompt(5 + 7 * number, seed=number)
    return naive_generation(prompt, number, SamplingParams(**sampling_of(number)), (EOS,), 512)[0]


async def submit_all(frontend: FakeFrontend) -> None:
    for number in range(1, NUM_REQUESTS + 1):
        prompt = make_prompt(5 + 7 * number, seed=number)
        await frontend.submit(number, prompt, sampling=sampling_of(number))


async def all_end_undisturbed(frontend: FakeFrontend) -> None:
    await frontend.wait_for(lambda: len(frontend.ends) == NUM_REQUESTS)
    for number in range(1, NUM_REQUESTS + 1):
        assert frontend.tokens[number] == expected(number), f"request {number}"
    status = await frontend.wait_status(lambda status: not status.num_used_blocks)
    assert (status.num_running, status.num_waiting) == (0, 0)


def once_at(step_id: int, act: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """A fault that meets the message of this step, the first time that it comes by."""
    has_met = False

    def fault(message: Any) -> list[Any]:
        nonlocal has_met
        body = getattr(message, message.WhichOneof("message"))
        if has_met or getattr(body, "step_id", 0) != step_id:
            return [message]
        has_met = True
        return act(message)

    return fault


def at_next(act: Callable[[Any], list[Any]], *, of_session: int = 0) -> Callable[[Any], list[Any]]:
    """A fault that meets the next message of a step, however many steps there were: a test that asks for their number
    and then names a later one is overtaken now and then.

    Args:
        of_session: Behind so many further welcomes.
    """
    num_welcomes = 0
    has_met = False

    def fault(message: Any) -> list[Any]:
        nonlocal num_welcomes, has_met
        kind = message.WhichOneof("message")
        num_welcomes += kind == "welcome"
        if has_met or num_welcomes < of_session or not getattr(getattr(message, kind), "step_id", 0):
            return [message]
        has_met = True
        return act(message)

    return fault


def cut(message: Any) -> list[Any]:
    raise Cut


def twice(message: Any) -> list[Any]:
    return [message, message]


def lost(message: Any) -> list[Any]:
    return []


class Swap:
    """Holds one message back until the next has passed."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._held: Any = None
        self._is_done = False

    def __call__(self, message: Any) -> list[Any]:
        if self._held is not None:
            held, self._held, self._is_done = self._held, None, True
            return [message, held]
        body = getattr(message, message.WhichOneof("message"))
        if not self._is_done and getattr(body, "step_id", 0) == self._step_id:
            self._held = message
            return []
        return [message]


@pytest.mark.parametrize("step_id", [1, 2, 9])
@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("act", [cut, twice], ids=["cut", "repeated"])
async def test_fault_at_any_message_changes_no_token(step_id, direction, act) -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        setattr(relay, direction, once_at(step_id, act))
        await submit_all(frontend)
        await all_end_undisturbed(frontend)
        assert relay.num_streams == (2 if act is cut else 1)
        status = await frontend.status()
        assert worker.runner.num_steps == status.num_steps, "a step was computed twice"
        assert status.num_preemptions == 0


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_lost_message_is_noticed_by_the_next_and_sent_again(direction) -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        setattr(relay, direction, once_at(5, lost))
        await submit_all(frontend)
        await all_end_undisturbed(frontend)
        assert relay.num_streams == 2
        assert worker.runner.num_steps == (await frontend.status()).num_steps


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_messages_out_of_order_are_sent_again_in_order(direction) -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        setattr(relay, direction, Swap(5))
        await submit_all(frontend)
        await all_end_undisturbed(frontend)
        assert relay.num_streams == 2
        assert worker.runner.num_steps == (await frontend.status()).num_steps


@pytest.mark.parametrize("kind", ["hello", "welcome"])
async def test_stream_cut_again_while_it_resumes(kind) -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        seen = 0

        def cut_the_second(message: Any) -> list[Any]:
            nonlocal seen
            seen += message.WhichOneof("message") == kind
            if message.WhichOneof("message") == kind and seen == 1:
                raise Cut
            return [message]

        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)
        cut_next = at_next(cut)
        if kind == "hello":
            relay.up, relay.down = cut_next, cut_the_second
        else:
            relay.down, relay.up = cut_next, cut_the_second
        await all_end_undisturbed(frontend)
        assert relay.num_streams == 3
        assert worker.runner.num_steps == (await frontend.status()).num_steps
        is_resumed = [welcome.session.is_resumed for welcome in relay.welcomes]
        assert not is_resumed[0]
        assert all(is_resumed[1:])


async def test_session_with_a_new_worker_is_resumed_like_the_first() -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)
        await worker.stop()
        other = WorkerStack(make_config(), NaiveRunner(make_config()))
        other.runner.facts = replace(other.runner.facts, boot_id="another boot")
        relay.up = at_next(cut, of_session=1)
        await other.start(worker.port)
        try:
            await all_end_undisturbed(frontend)
        finally:
            await other.stop()
        is_resumed = [welcome.session.is_resumed for welcome in relay.welcomes]
        assert is_resumed == [False, False, True]


async def test_many_cuts_one_after_the_other() -> None:
    async with relayed_stack() as (worker, relay, _, frontend):
        seen = 0

        def cut_every_fifth(message: Any) -> list[Any]:
            nonlocal seen
            seen += message.HasField("result")
            if message.HasField("result") and seen % 5 == 0:
                raise Cut
            return [message]

        relay.up = cut_every_fifth
        await submit_all(frontend)
        await all_end_undisturbed(frontend)
        assert relay.num_streams > 3
        assert worker.runner.num_steps == (await frontend.status()).num_steps


class Weather:
    """Any message may be lost, repeated, overtaken by the next, or the last one before a cut; seeded."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._held: list[Any] = []
        self.is_foul = True

    def __call__(self, message: Any) -> list[Any]:
        out, self._held = [message, *self._held], []
        fate = self._random.random()
        if not self.is_foul or message.WhichOneof("message") in ("hello", "welcome", "goodbye"):
            return out
        if fate < 0.02:
            raise Cut
        if fate < 0.04:
            return out[1:]
        if fate < 0.08:
            return [*out, message]
        if fate < 0.10:
            self._held = [message]
            return out[1:]
        return out


@pytest.mark.parametrize("seed", range(6))
async def test_foul_weather_in_both_directions_changes_no_token(seed, monkeypatch) -> None:
    monkeypatch.setattr("triptych_services.enginecore.workers.connection._SILENCE_S", 0.2)
    async with relayed_stack() as (worker, relay, _, frontend):
        weather = Weather(seed), Weather(-seed - 1)
        relay.down, relay.up = weather
        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.ends) > NUM_REQUESTS // 2)
        for direction in weather:  # a message that is held back for ever is a stream that hangs
            direction.is_foul = False
        await all_end_undisturbed(frontend)
        assert relay.num_streams > 1
        assert {hello.session.resume_session for hello in relay.hellos[1:]} == {
            relay.welcomes[0].session.name
        }
        assert worker.runner.num_steps == (await frontend.status()).num_steps


async def test_requests_come_and_go_while_the_stream_is_down() -> None:
    async with relayed_stack() as (_, relay, _, frontend):
        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)
        relay.is_refusing = True
        relay.down = at_next(cut)
        await frontend.abort(1, 2, 3)
        await frontend.submit(50, make_prompt(9), sampling={"max_tokens": 3, "ignore_eos": True})
        await frontend.wait_for(lambda: {1, 2, 3} <= frontend.ends.keys())
        relay.down = lambda message: [message]
        relay.is_refusing = False
        await frontend.wait_for(lambda: len(frontend.ends) == NUM_REQUESTS + 1)
        for number in range(4, NUM_REQUESTS + 1):
            assert frontend.tokens[number] == expected(number)
        assert len(frontend.tokens[50]) == 3
        await frontend.wait_status(lambda status: not status.num_used_blocks)


async def test_expired_session_is_computed_again_with_the_same_tokens() -> None:
    async with relayed_stack(resume_ttl_s=0.1) as (_, relay, _, frontend):
        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)
        relay.is_refusing = True
        relay.up = at_next(cut)
        await frontend.wait_for(lambda: not frontend.welcomes[-1].ready)
        status = await frontend.status()
        assert (status.num_running, status.num_used_blocks) == (0, 0)
        relay.is_refusing = False
        await all_end_undisturbed(frontend)
        assert relay.hellos[-1].session.resume_session == ""
        assert not relay.welcomes[-1].session.is_resumed
        assert frontend.welcomes[-1].ready


async def test_a_stream_that_never_gets_anywhere_is_given_up() -> None:
    async with relayed_stack() as (_, relay, _, frontend):
        is_broken = True

        def cut_all_results(message: Any) -> list[Any]:
            if is_broken and message.HasField("result"):
                raise Cut
            return [message]

        relay.up = cut_all_results
        await submit_all(frontend)
        async with asyncio.timeout(DEADLINE_S):
            while sum(hello.session.resume_session == "" for hello in relay.hellos) < 2:
                await asyncio.sleep(0.01)
        is_broken = False
        await all_end_undisturbed(frontend)


async def test_an_engine_whose_place_was_taken_ends() -> None:
    async with relayed_stack() as (worker, relay, engine, frontend):
        await submit_all(frontend)
        await frontend.wait_for(lambda: len(frontend.tokens) == NUM_REQUESTS)
        relay.is_refusing = True
        relay.up = at_next(cut)
        successor = make_executor(worker.port, make_config(), boot_id="its next process")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    connected = await successor.connect(lambda: None, resume=False)
                    break
                except WorkerHeld:  # until the worker knows of the cut
                    await asyncio.sleep(0.01)
        assert not connected.is_resumed
        relay.is_refusing = False
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([engine.task])
        assert isinstance(engine.task.exception(), StaleEpoch)
        await successor.close()


async def test_the_request_that_kills_the_worker_fails_alone() -> None:
    async with relayed_stack() as (worker, _, _, frontend):
        poison = make_prompt(40, seed=999)

        def has_poison(plan: StepPlan) -> bool:
            return any(row.token_ids[: len(poison)].tolist() == poison for row in plan.new_rows)

        worker.runner.fail_at = has_poison
        await submit_all(frontend)
        await frontend.submit(99, poison, sampling=GREEDY)
        await frontend.wait_for(lambda: len(frontend.ends) == NUM_REQUESTS + 1)
        end = frontend.ends.pop(99)
        assert isinstance(end, RequestFailure)
        assert end.code == EngineFailure.code
        assert "died twice" in end.message
        await all_end_undisturbed(frontend)
