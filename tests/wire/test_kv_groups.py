"""An engine and a worker with several groups of layers, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import EngineStack, FakeFrontend, NaiveRunner, WorkerStack, make_config
from tests.helpers.step_relay import StepRelay
from triptych.rpc.session.handshake import KV_GROUPS
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych.types.sampling import SamplingParams

SAMPLING = {"max_tokens": 40, "ignore_eos": True}
FULL = KvLayout(200, 16, 1, 1, 1, "float32").groups[0]
GROUPS = (FULL, replace(FULL, kind=KvKind.WINDOW, window=40), KvGroup(KvKind.STATE, 1, 32, 4096))


@asynccontextmanager
async def stack(**faults: Any) -> AsyncIterator[tuple[EngineStack, FakeFrontend]]:
    """Start a worker of three groups, an engine that dials it through a relay, and a frontend."""
    config = make_config()
    runner = NaiveRunner(config)
    kv = KvLayout(400, 16, 1, 1, 1, "float32", groups=GROUPS, num_state_blocks=60, continues_states=True)
    runner.facts = replace(runner.facts, kv=kv)
    runner.reset()
    worker = WorkerStack(config, runner)
    await worker.start()
    relay = StepRelay(worker.port)
    for name, fault in faults.items():
        setattr(relay, name, fault)
    await relay.start()
    engine = EngineStack(make_config(relay.port))
    await engine.start()
    frontend = FakeFrontend(engine.address)
    await frontend.start()
    try:
        yield engine, frontend
    finally:
        for part in (frontend, engine, relay, worker):
            await part.stop()


def without_groups(session: Any) -> None:
    session.features &= ~KV_GROUPS


def older_engine(message: Any) -> list[Any]:
    if message.HasField("hello"):
        without_groups(message.hello.session)
    return [message]


def older_worker(message: Any) -> list[Any]:
    if message.HasField("welcome"):
        without_groups(message.welcome.session)
    return [message]


@pytest.mark.parametrize(
    ("faults", "behind"), [({"down": older_engine}, "engine core"), ({"up": older_worker}, "worker")]
)
async def test_an_end_that_knows_no_groups_is_refused(faults: dict[str, Any], behind: str) -> None:
    async with stack(**faults) as (_, frontend), asyncio.timeout(60):
        told = f"upgrade the {behind} first"
        await frontend.wait_for(
            lambda: bool(frontend.welcomes) and told in frontend.welcomes[-1].why_not_ready
        )


async def test_tables_of_all_groups_reach_the_worker() -> None:
    """The worker holds each position that is read against what it must be."""
    async with stack() as (_, frontend), asyncio.timeout(60):
        await frontend.wait_ready()
        prompts = [make_prompt(70, seed=number % 2) + make_prompt(3, seed=number) for number in range(6)]
        for number, prompt in enumerate(prompts):
            await frontend.submit(number, prompt, sampling=SAMPLING)
        await frontend.wait_for(lambda: len(frontend.ends) == len(prompts))
        for number, prompt in enumerate(prompts):
            tokens, *_ = naive_generation(prompt, number, SamplingParams(**SAMPLING), (EOS,), 512)
            assert frontend.tokens[number] == tokens
