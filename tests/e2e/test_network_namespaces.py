"""The three tiers on hosts of their own, whose cables are pulled while a stream runs, and put back."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.helpers.network_namespaces import Hosts, hosts, why_unavailable
from tests.helpers.processes import service_process

pytestmark = [
    pytest.mark.model,  # its tokenizer
    pytest.mark.skipif(bool(why := why_unavailable()), reason=why),
]

HTTP_PORT, TIERS = 8000, ("frontend", "enginecore", "worker")
DEADLINE_S = 60.0
NUM_TOKENS = 300
STEP_MS = 10
CUT_S = 2.5


@asynccontextmanager
async def stack_on(network: Hosts, directory: Path) -> AsyncIterator[None]:
    """Run a simulated stack, one tier on each host, with sessions that outlive a pulled cable or not."""
    async with AsyncExitStack() as stack:
        for tier, flags in {
            "worker": (
                "--worker.host=0.0.0.0",
                "--worker.port=50053",
                "--simulation.enabled=true",
                f"--simulation.base-ms={STEP_MS}",
            ),
            "enginecore": (
                "--engine.host=0.0.0.0",
                "--engine.port=50052",
                f"--engine.worker-address={network.address('worker')}:50053",
            ),
            "frontend": (
                "--frontend.host=0.0.0.0",
                f"--frontend.http-port={HTTP_PORT}",
                f"--frontend.engine-addresses={network.address('enginecore')}:50052",
            ),
        }.items():
            await stack.enter_async_context(
                service_process(tier, directory, *flags, prefix=network.command(tier))
            )
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
