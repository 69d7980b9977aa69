"""Measures how long a stream's KV blocks stay taken after its client has left: over HTTP and gRPC, in steps.

The worker is simulated, and so is the time of its steps. The engine's status is asked for all the time, so that the
figure holds the time of one answer, too: about a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import grpc.aio

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster

PROMPT = list(range(1000, 1200))
NUM_TOKENS = 3  # that a client reads before it leaves
_TIMEOUT_S = 30.0

Leave = Callable[[], Awaitable[None]]


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(arguments.step_ms)
    with running(config) as cluster:
        for number in range(arguments.rounds + 1):
            for api, enter in (("http", enter_http), ("grpc", enter_grpc)):
                taken_s = asyncio.run(taken_after_leaving_s(cluster, enter))
                if number:
                    yield Figure(
                        f"{api}: blocks are free after", "steps", (1e3 * taken_s / arguments.step_ms,)
                    )


async def taken_after_leaving_s(
    cluster: LocalCluster, enter: Callable[[LocalCluster], Awaitable[Leave]]
) -> float:
    """Return the seconds from a client's leaving to the moment when no block is taken.

    Raises:
        TimeoutError: Blocks stay taken.
    """
    async with grpc.aio.insecure_channel(cluster.admin_address) as channel, asyncio.timeout(_TIMEOUT_S):
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        async def num_used_blocks() -> int:
            response = await stub.GetStatus(admin_pb2.GetStatusRequest())
            return int(response.status.num_used_blocks)

        leave = await enter(cluster)
        if not await num_used_blocks():
            raise ValueError("the stream holds no blocks: there is nothing to measure")
        began_at = time.perf_counter()
        await leave()
        while await num_used_blocks():
            pass
        return time.perf_counter() - began_at


async def enter_http(cluster: LocalCluster) -> Leave:
    """Begin a stream and return what closes its connection."""
    host, port = cluster.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 7_000, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(NUM_TOKENS):
        await reader.readuntil(b"data: ")

    async def leave() -> None:
        writer.transport.abort()

    return leave


async def enter_grpc(cluster: LocalCluster) -> Leave:
    """Begin a stream and return what cancels its call."""
    client = GenerationClient(cluster.address)
    events = client.generate(PROMPT, {"max_tokens": 7_000, "ignore_eos": True})
    for _ in range(1 + NUM_TOKENS):
        await anext(events)

    async def leave() -> None:
        await events.aclose()
        await client.close()

    return leave


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=20)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of each step (default: 20)")
    sys.exit(run(parser, measure))
