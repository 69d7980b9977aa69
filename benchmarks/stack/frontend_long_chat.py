"""Measures the cost of long HTTP requests to other streams: p99 gap of 8 readers, in turn with and without them.

The worker is simulated, with steps of 10 ms. The long requests are sent one after another, so that one is read,
checked, rendered and tokenized at any time. They keep the last 16 tokens of the prompt and ask for one.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.harness.cluster import running
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.client.grpc_client import GenerationClient
from triptych.client.stream_stats import StreamStats
from triptych.launcher.launch import config_from_overrides

NUM_READERS = 8
OUTPUT_LEN = 200
STEP_MS = 10.0


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    body = long_chat(arguments.messages, arguments.chars)
    config = config_from_overrides({"simulation.enabled": True, "simulation.base_ms": STEP_MS})
    with running(config) as cluster:
        asyncio.run(gap_s(cluster.address))  # warm up
        for _ in range(arguments.rounds):
            alone_s = asyncio.run(gap_s(cluster.address))
            pipe, child_end = multiprocessing.Pipe()
            sender = multiprocessing.Process(
                target=send_long_requests, args=(cluster.http_address, body, child_end)
            )
            sender.start()
            child_end.close()
            time.sleep(0.2)
            beside_s = asyncio.run(gap_s(cluster.address))
            pipe.send("stop")
            request_s = pipe.recv()
            sender.join()
            yield Figure("p99 gap, no long requests", "ms", (1e3 * alone_s,))
            yield Figure("p99 gap, beside long requests", "ms", (1e3 * beside_s,))
            yield Figure("p99 gap, beside / without", "", (beside_s / alone_s,))
            yield Figure("a long request", "ms", (1e3 * request_s,), note=f"{len(body) / 1e6:.1f} MB")


async def gap_s(address: str) -> float:
    """Read all streams side by side and return the 99th percentile of their gaps between deltas."""

    async def read(number: int) -> list[float]:
        stats, sampling = StreamStats(), {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "seed": 0}
        async for event in client.generate([0, number, 11], sampling):
            stats.add(event)
        return stats.gaps_s

    async with GenerationClient(address) as client:
        gaps_s = await asyncio.gather(*(read(number) for number in range(NUM_READERS)))
    return float(np.percentile(np.concatenate(gaps_s), 99))


def long_chat(num_messages: int, num_chars: int) -> bytes:
    messages = [{"role": "user", "content": "x" * num_chars}] * num_messages
    return json.dumps({"max_tokens": 1, "truncate_prompt_tokens": 16, "messages": messages}).encode()


def send_long_requests(http_address: str, body: bytes, pipe: Connection) -> None:
    """Send one after another until `pipe` says stop, then answer with the mean seconds of one.

    Runs in a process of its own, so that it slows the readers only by what the server does.
    """
    connection = http.client.HTTPConnection(http_address)
    num_sent, started_s = 0, time.perf_counter()
    while not num_sent or not pipe.poll():
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {text[:300]!r}")
        num_sent += 1
    pipe.send((time.perf_counter() - started_s) / num_sent)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument("--messages", type=int, default=16384)
    parser.add_argument("--chars", type=int, default=8, help="of each message")
    sys.exit(run(parser, measure))
