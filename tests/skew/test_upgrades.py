"""This build and the one of the protocol version before, side by side: any order that is allowed loses nothing."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.chaos.grounds.processes import DEADLINE_S, ROOT, ProcessGround, process_ground
from tests.chaos.load import answers_undisturbed, make_load, run_clients, sender_to
from tests.chaos.recorder import Recorder
from tests.chaos.validators import Evidence, Home, violations_of
from tests.skew.older_build import extract_older_build
from tests.skew.plans import NEW, OLD, Move, make_plan
from triptych.client.grpc_client import GenerationClient

pytestmark = [pytest.mark.model, pytest.mark.slow]  # of the model the tokenizer

NUM_STREAMS = 32
NUM_ENGINES, NUM_FRONTENDS = 2, 3
NUM_PLANS = int(os.environ.get("PLANS", "1"))
FIRST_PLAN = int(os.environ.get("FIRST_PLAN", "0"))
KINDS = ("greedy", "sampled", "choices", "stop", "logprobs", "slow")
OPTIONS = {"worker": ("--simulation.base-ms=8",)}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {OLD: extract_older_build(tmp_path_factory.mktemp("older")), NEW: ROOT}


async def _carry_out(ground: ProcessGround, plan: list[Move], builds: dict[str, Path]) -> None:
    for move in plan:
        await ground.replace(move.process, builds[move.build])
        for member in ground.of_kind("frontend"):
            await ground.wait_ready(member.name)


async def _homes(ground: ProcessGround) -> list[Home]:
    """Return what the engines hold, once they have had time to let go of it."""
    homes = []
    for member in ground.of_kind("enginecore"):
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status = await ground.status(member.name)
                names = ("num_running", "num_waiting", "num_used_blocks")
                held = {name: getattr(status, name) for name in names}
                if not any(held.values()):
                    break
                await asyncio.sleep(0.05)
        homes.append(Home(member.name, held))
    return homes


@pytest.mark.parametrize("seed", range(FIRST_PLAN, FIRST_PLAN + NUM_PLANS))
async def test_a_plan_under_load(seed: int, tmp_path: Path, builds: dict[str, Path]) -> None:
    """All streams go on, unchanged, while processes are replaced; new ones find a frontend that takes them."""
    plan = make_plan(seed, NUM_ENGINES, NUM_FRONTENDS)
    print("; ".join(map(str, plan)))
    requests = make_load(seed, NUM_STREAMS, vocabulary=range(1000, 9000), max_tokens=120, kinds=KINDS)
    async with AsyncExitStack() as stack:
        ground = await stack.enter_async_context(
            process_ground(
                tmp_path, build=builds[OLD], num_engines=NUM_ENGINES, num_frontends=NUM_FRONTENDS, **OPTIONS
            )
        )
        clients = [
            await stack.enter_async_context(GenerationClient(member.address))
            for member in ground.of_kind("frontend")
        ]
        send = sender_to(clients)
        oracle = await answers_undisturbed(requests, send)
        rollout = asyncio.create_task(_carry_out(ground, plan, builds))
        num_rounds = 0
        while not rollout.done():
            recorder = Recorder(asyncio.get_running_loop().time)
            clients_run = asyncio.create_task(
                run_clients(requests, recorder, send, patience_s=DEADLINE_S), name="clients"
            )
            await asyncio.wait((clients_run, rollout), return_when=asyncio.FIRST_COMPLETED)
            if rollout.done():
                rollout.result()
            await clients_run
            assert not violations_of(Evidence(requests, recorder.history, oracle)), plan
            num_rounds += 1
        await rollout
        evidence = Evidence((), (), oracle, homes=await _homes(ground))
        assert not violations_of(evidence), plan
        assert num_rounds


async def test_wrong_orders_are_refused_by_name(tmp_path: Path, builds: dict[str, Path]) -> None:
    """A newer engine core at an older worker, a newer frontend at an older engine core: it says so, and waits."""
    async with process_ground(tmp_path, build=builds[OLD]) as ground:
        await ground.replace("enginecore-0", ROOT)
        async with asyncio.timeout(DEADLINE_S):
            while "protocol: the client speaks 4..4, the server 3" not in await _why_not_ready(ground):
                await asyncio.sleep(0.05)
        await ground.replace("worker-0", ROOT)
        await ground.wait_ready("frontend-0")
        await ground.replace("enginecore-0", builds[OLD])
        await ground.wait_ready("frontend-0")
        await ground.replace("frontend-0", ROOT)
        async with GenerationClient(ground.members["frontend-0"].address) as client:
            async with asyncio.timeout(DEADLINE_S):
                while "protocol: the client speaks 4..4, the server 3" not in await _why_unhealthy(client):
                    await asyncio.sleep(0.05)
        await ground.replace("enginecore-0", ROOT)
        await ground.wait_ready("frontend-0")


async def _why_not_ready(ground: ProcessGround) -> str:
    try:
        return (await ground.status("enginecore-0")).why_not_ready
    except Exception as error:  # it is not there yet
        return repr(error)


async def _why_unhealthy(client: GenerationClient) -> str:
    try:
        await client.check_health()
    except Exception as error:
        return str(error)
    return ""
