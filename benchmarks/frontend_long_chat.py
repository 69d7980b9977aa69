"""Measures the cost of long HTTP requests to other streams: p99 gap of 8 readers, in turn with and without them.

    python benchmarks/frontend_long_chat.py [--rounds 5] [--messages 16384] [--chars 8] [--ids 0]

The worker is simulated, with steps of 10 ms. The long requests are sent one after another, so that one is read,
checked, rendered and tokenized at any time. They keep the last 16 tokens of the prompt and ask for one.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Event

import numpy as np

from triptych.client.grpc_client import GenerationClient
from triptych.launcher.launch import config_from_overrides, launch
from triptych.types.events import DeltaEvent

NUM_READERS = 8
OUTPUT_LEN = 200


async def p99_gap_s(address: str) -> float:
    gaps: list[float] = []

    async def read(client: GenerationClient, number: int) -> None:
        last_at = None
        sampling = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "seed": number}
        async for event in client.generate([number, 11], sampling):
            if isinstance(event, DeltaEvent):
                now = time.perf_counter()
                if last_at is not None:
                    gaps.append(now - last_at)
                last_at = now

    async with GenerationClient(address) as client:
        await asyncio.gather(*(read(client, number) for number in range(NUM_READERS)))
    return float(np.percentile(gaps, 99))


def send_long_requests(http_address: str, path: str, body: bytes, stop: Event) -> None:
    """Run in a process of its own, so that it slows the readers only by what the server does."""
    connection = http.client.HTTPConnection(http_address)
    num_sent, elapsed_s = 0, 0.0
    while not stop.is_set():
        started = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {text[:300]!r}")
        num_sent, elapsed_s = num_sent + 1, elapsed_s + time.perf_counter() - started
    print(
        f"  {num_sent} requests of {len(body) / 1e6:.1f} MB, {elapsed_s / max(1, num_sent) * 1e3:.0f} ms each"
    )


def measure(address: str, http_address: str, path: str, body: bytes, num_rounds: int) -> None:
    asyncio.run(p99_gap_s(address))  # warm up
    ratios = []
    for number in range(num_rounds):
        alone = asyncio.run(p99_gap_s(address))
        stop = multiprocessing.Event()
        sender = multiprocessing.Process(target=send_long_requests, args=(http_address, path, body, stop))
        sender.start()
        time.sleep(0.2)
        beside = asyncio.run(p99_gap_s(address))
        stop.set()
        sender.join()
        ratios.append(beside / alone)
        print(
            f"round {number + 1}: p99 gap {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside them",
            flush=True,
        )
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=16384)
    parser.add_argument("--chars", type=int, default=8, help="of each message")
    parser.add_argument("--ids", type=int, default=0, help="send so many token ids instead of a chat")
    arguments = parser.parse_args()
    path, request = "/v1/chat/completions", {"max_tokens": 1, "truncate_prompt_tokens": 16}
    if arguments.ids:
        path, request = "/v1/completions", {**request, "prompt": [i % 40_000 for i in range(arguments.ids)]}
    else:
        message = {"role": "user", "content": "x" * arguments.chars}
        request = {**request, "messages": [message] * arguments.messages}
    cluster = launch(config_from_overrides({"simulation.enabled": True, "simulation.base_ms": 10.0}))
    try:
        body = json.dumps(request).encode()
        measure(cluster.address, cluster.http_address, path, body, arguments.rounds)
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
