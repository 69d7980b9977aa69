"""The three tiers on hosts of their own, whose cables are pulled while a stream runs, and put back, or which move."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from tests.helpers.network_namespaces import Hosts, hosts, why_unavailable
from tests.helpers.processes import Service, service_process

pytestmark = [
    pytest.mark.model,  # its tokenizer
    pytest.mark.skipif(bool(why := why_unavailable()), reason=why),
]

HTTP_PORT, TIERS = 8000, ("frontend", "enginecore", "worker")
DEADLINE_S = 60.0
NUM_TOKENS = 300
STEP_MS = 10
CUT_S = 2.5
FOUND_S = 15.0
"""For a few dials, of which each takes up to 2 s where the old address is silent."""


@asynccontextmanager
async def tier_on(
    network: Hosts, host: str, tier: str, directory: Path, engine_address: str = ""
) -> AsyncIterator[Service]:
    """Run one tier of a simulated stack on a host. `engine_address`: As a frontend dials it."""
    flags = {
        "worker": (
            "--worker.host=0.0.0.0",
            "--worker.port=50053",
            "--simulation.enabled=true",
            f"--simulation.base-ms={STEP_MS}",
        ),
        "enginecore": (
            "--engine.host=0.0.0.0",
            "--engine.port=50052",
            "--engine.engine-id=engine",
            f"--engine.worker-address={network.address('worker')}:50053",
        ),
        "frontend": (
            "--frontend.host=0.0.0.0",
            f"--frontend.http-port={HTTP_PORT}",
            f"--frontend.engine-addresses={engine_address}:50052",
            "--frontend.move-timeout-s=120",
        ),
    }[tier]
    async with service_process(tier, directory, *flags, prefix=network.command(host)) as service:
        yield service


@asynccontextmanager
async def stack_on(network: Hosts, directory: Path) -> AsyncIterator[None]:
    """Run a simulated stack, one tier on each host, with sessions that outlive a pulled cable or not."""
    async with AsyncExitStack() as stack:
        for tier in reversed(TIERS):
            tiers = tier_on(network, tier, tier, directory, network.address("enginecore"))
            await stack.enter_async_context(tiers)
        yield


def stream(network: Hosts, on_text: threading.Event) -> str:
    """Return a completion's text; `on_text` is set when half a second of it has come."""
    body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0.8, "seed": 7}

    def complete() -> str:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            connection = http.client.HTTPConnection(
                network.address("frontend"), HTTP_PORT, timeout=DEADLINE_S
            )
            try:
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                if response.status == 200:
                    break
                assert response.status == 503, response.read()
            except ConnectionError:
                pass
            assert time.monotonic() < deadline, "the stack does not become ready"
            connection.close()
            time.sleep(0.2)
        text = ""
        for number, line in enumerate(response):
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
            if number > 1000 * 0.5 / STEP_MS:
                on_text.set()
        connection.close()
        return text

    return network.run("client", complete)


@pytest.mark.thorough
@pytest.mark.parametrize("tier", TIERS[1:])
async def test_a_pulled_cable_delays_a_stream_and_changes_nothing(tier: str, tmp_path: Path) -> None:
    with hosts(*TIERS, "client") as network:
        async with stack_on(network, tmp_path):
            undisturbed = await asyncio.to_thread(stream, network, threading.Event())
            runs = threading.Event()
            disturbed = asyncio.create_task(asyncio.to_thread(stream, network, runs))
            assert await asyncio.to_thread(runs.wait, DEADLINE_S), "no text has come"
            network.cut(tier)
            cut_at = time.monotonic()
            await asyncio.sleep(CUT_S)
            assert not disturbed.done(), "the stream was over before it was cut"
            network.heal(tier)
            assert await disturbed == undisturbed
            assert time.monotonic() - cut_at > CUT_S
            assert undisturbed


@pytest.mark.thorough
async def test_an_engine_is_found_under_its_name_at_another_address(tmp_path: Path) -> None:
    """Its stream goes on. gRPC alone looks a name up again 30 s after the last time."""
    with hosts("frontend", "old", "new", "worker", "client") as network:
        network.give_name("frontend", "engine.test", "old")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(tier_on(network, "worker", "worker", tmp_path))
            engine = await stack.enter_async_context(tier_on(network, "old", "enginecore", tmp_path))
            await stack.enter_async_context(tier_on(network, "frontend", "frontend", tmp_path, "engine.test"))
            runs = threading.Event()
            disturbed = asyncio.create_task(asyncio.to_thread(stream, network, runs))
            assert await asyncio.to_thread(runs.wait, DEADLINE_S), "no text has come"
            engine.process.kill()
            await engine.process.wait()
            network.cut("old")
            engine = await stack.enter_async_context(tier_on(network, "new", "enginecore", tmp_path))
            await engine.port()
            assert not await asyncio.to_thread(is_ready, network)
            network.give_name("frontend", "engine.test", "new")
            async with asyncio.timeout(FOUND_S):
                while not await asyncio.to_thread(is_ready, network):
                    await asyncio.sleep(0.05)
            text = await disturbed
            assert text == await asyncio.to_thread(stream, network, threading.Event())


def is_ready(network: Hosts) -> bool:
    """Return whether the frontend takes requests."""

    def ask() -> bool:
        connection = http.client.HTTPConnection(network.address("frontend"), HTTP_PORT, timeout=DEADLINE_S)
        connection.request("GET", "/health")
        with closing(connection):
            return connection.getresponse().status == 200

    return network.run("client", ask)
