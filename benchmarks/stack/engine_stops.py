"""Time to the first token after short stops of the engine core: before them, right after them, and 5 s later.

A garbage collection, a neighbour on the machine or a migration stops a process for some ms. The engine may then keep
more steps in flight, and a new request's first step is behind all of these. Simulated steps, one other stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.client.admin_client import AdminClient
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent

SETTLE_S = 1.0
BETWEEN_STOPS_S = 0.5
LATER_S = 5.0
OTHER_STREAM_TOKENS = 4096


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(arguments.step_ms, max_num_seqs=64)
    for _ in range(arguments.rounds):
        with running(config) as cluster:
            yield from asyncio.run(_first_tokens(cluster, arguments))


async def _first_tokens(cluster: LocalCluster, arguments: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    async with (
        GenerationClient(cluster.address) as client,
        _admin(cluster.admin_address) as admin,
        _streaming(client),
    ):

        async def probe(when: str) -> float:
            found_ms = [
                1e3 * await _first_token_s(client, number, max_tokens=4) for number in range(arguments.probes)
            ]
            ((_, status),) = await admin.status()
            figures.append(
                Figure(f"{when}: steps in flight", "", (status.steps_in_flight,), less_is_better=True)
            )
            median_ms = float(np.median(found_ms))
            figures.append(Figure(f"{when}: first token, median", "ms", (median_ms,), less_is_better=True))
            return median_ms

        await asyncio.sleep(SETTLE_S)
        fresh_ms = await probe("before")
        for _ in range(arguments.stops):
            os.kill(cluster.pids["enginecore"], signal.SIGSTOP)
            await asyncio.sleep(arguments.stop_ms / 1e3)
            os.kill(cluster.pids["enginecore"], signal.SIGCONT)
            await asyncio.sleep(BETWEEN_STOPS_S)
        await probe("after the stops")
        await asyncio.sleep(LATER_S)
        later_ms = await probe(f"{LATER_S:.0f} s later")
    figures.append(Figure("first token, later / before", "", (later_ms / fresh_ms,), less_is_better=True))
    return figures


async def _first_token_s(client: GenerationClient, number: int, max_tokens: int) -> float:
    """Return the seconds to a request's first token, and wait for its end and for a random part of a step."""
    sent_s = time.monotonic()
    first_s = None
    async for event in client.generate([300 + number, 7, 9], {"max_tokens": max_tokens, "ignore_eos": True}):
        if isinstance(event, DeltaEvent) and first_s is None:
            first_s = time.monotonic() - sent_s
    await asyncio.sleep(0.05 * float(np.random.default_rng(number).random()))
    assert first_s is not None, "the answer has no token"
    return first_s


@asynccontextmanager
async def _admin(address: str) -> AsyncIterator[AdminClient]:
    admin = AdminClient(address)
    try:
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def _streaming(client: GenerationClient) -> AsyncIterator[None]:
    """Keep the worker busy with another stream, one after the other."""

    async def stream() -> None:
        while True:
            await _first_token_s(client, 99, OTHER_STREAM_TOKENS)

    streaming = asyncio.create_task(stream())
    try:
        yield
    finally:
        streaming.cancel()


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=1)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--stops", type=int, default=8)
    parser.add_argument("--stop-ms", type=float, default=150.0)
    parser.add_argument("--probes", type=int, default=20, help="requests of each measurement (default: 20)")
    sys.exit(run(parser, measure))
