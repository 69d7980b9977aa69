"""Clients of the protocol version before, on both streams; tests/skew has whole builds of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    running_stack,
)
from tests.helpers.step_relay import Cut, StepRelay
from triptych.errors import HandshakeMismatch
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, WORKER_PROTOCOL
from triptych.rpc.status import from_rpc_error
from triptych.types.sampling import SamplingParams

BEFORE = replace(ENGINE_PROTOCOL, version=ENGINE_PROTOCOL.version - 1, features=0)
SAMPLING = {"max_tokens": 60, "ignore_eos": True}
NUM_REQUESTS = 8


async def submit_all(frontend: FakeFrontend) -> None:
    for number in range(NUM_REQUESTS):
        await frontend.submit(number, make_prompt(9 + number, seed=number), sampling=SAMPLING)


async def all_end_undisturbed(frontend: FakeFrontend) -> None:
    await frontend.wait_for(lambda: len(frontend.ends) == NUM_REQUESTS)
    for number in range(NUM_REQUESTS):
        prompt = make_prompt(9 + number, seed=number)
        tokens, *_ = naive_generation(prompt, number, SamplingParams(**SAMPLING), (EOS,), 512)
        assert frontend.tokens[number] == tokens


async def test_a_frontend_of_the_version_before_is_answered_in_it() -> None:
    async with running_stack() as (_, engine, _):
        older = FakeFrontend(engine.address, protocol=BEFORE)
        await older.start()
        await older.wait_ready()
        await submit_all(older)
        await all_end_undisturbed(older)
        assert (older.terms.agreement.version, older.terms.agreement.features) == (BEFORE.version, 0)
        await older.stop()


@pytest.mark.parametrize(
    ("distance", "told"), [(-2, "upgrade the frontend first"), (1, "upgrade the engine core first")]
)
async def test_a_frontend_too_far_away_is_refused_by_name(distance: int, told: str) -> None:
    async with running_stack() as (_, engine, _):
        other = FakeFrontend(
            engine.address, protocol=replace(ENGINE_PROTOCOL, version=ENGINE_PROTOCOL.version + distance)
        )
        await other.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.ended()
        error = from_rpc_error(caught.value)
        assert isinstance(error, HandshakeMismatch)
        assert told in error.message
        other.vanish()


class OlderEngine:
    """Turns an engine's messages into those of the version before, and the worker's answers back."""

    def __init__(self) -> None:
        self.answered_in: list[int] = []
        self.num_results_until_cut = 20

    def down(self, message: Any) -> list[Any]:
        if message.HasField("hello"):
            hello = message.hello
            hello.ClearField("boot_id")
            hello.ClearField("last_session")
            hello.epoch = 1_700_000_000_000
            hello.session.min_protocol = hello.session.max_protocol = WORKER_PROTOCOL.version - 1
        return [message]

    def up(self, message: Any) -> list[Any]:
        if message.HasField("welcome"):
            self.answered_in.append(message.welcome.session.protocol)
            message.welcome.session.protocol = WORKER_PROTOCOL.version
        elif message.HasField("result"):
            self.num_results_until_cut -= 1
            if self.num_results_until_cut == 0:
                raise Cut
        return [message]


async def test_an_engine_of_the_version_before_is_served_and_resumes() -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    relay, older = StepRelay(worker.port), OlderEngine()
    relay.down, relay.up = older.down, older.up
    await relay.start()
    engine = EngineStack(make_config(relay.port))
    await engine.start()
    frontend = FakeFrontend(engine.address)
    await frontend.start()
    async with asyncio.timeout(60):
        await frontend.wait_ready()
    await submit_all(frontend)
    await all_end_undisturbed(frontend)
    assert older.answered_in == [WORKER_PROTOCOL.version - 1] * 2
    assert relay.welcomes[-1].session.is_resumed
    for part in (frontend, engine, relay, worker):
        await part.stop()
