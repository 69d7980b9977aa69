"""Measures a server under overload: good answers per second beside its capacity.

An open loop over HTTP: completions are sent at a fixed rate, whatever became of those before. The worker is simulated,
with steps of 30 ms. 36 requests of 30 tokens run at once, which is 40 requests per second, and 128 may wait. A refused
request counts as refused well if it is a 429 with Retry-After. Refused requests are not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure

STEP_MS = 30.0
NUM_RUNNING = 36
NUM_WAITING = 128
OUTPUT_LEN = 30
PROMPT_CHARS = 2000
CAPACITY = NUM_RUNNING / (OUTPUT_LEN * STEP_MS / 1e3)
"""Requests per second."""
FILL_S = 6.0
"""Until the queue is full and the first that waited have ended."""


@dataclass
class Outcomes:
    """Counts of the requests that ended while it was measured."""

    num_good: int = 0
    refusals_s: list[float] = field(default_factory=list)
    """Seconds of each request that was refused well."""
    others: Counter[str] = field(default_factory=Counter)
    """Status, or what went wrong -> how often."""


class HttpClient:
    """Keeps its connections and uses them again; just enough HTTP to cost less than what is measured."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Return status and headers, these in lower case."""
        connection = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        reader, writer = connection
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), self._host.encode(), len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers[b"content-length"]))
        self._idle.append(connection)
        return int(head[0].split()[1]), headers


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(
        STEP_MS, max_num_seqs=NUM_RUNNING, max_num_waiting=NUM_WAITING, max_num_batched_tokens=32768
    )
    for _ in range(arguments.rounds):
        with running(config) as cluster:
            host, port = cluster.http_address.rsplit(":", 1)
            with ProcessPoolExecutor(1) as client:  # a process of its own
                offered = client.submit(run_client, host, int(port), arguments.rate, arguments.seconds)
                outcomes = offered.result()
        good = outcomes.num_good / arguments.seconds
        yield Figure("good answers", "1/s", (good,), limit=CAPACITY)
        yield Figure("refused with 429 and Retry-After", "", (len(outcomes.refusals_s),))
        for name, percent in (("p50", 50), ("p99", 99)):
            refusal_s = float(np.percentile(outcomes.refusals_s or [0.0], percent))
            yield Figure(f"time to a refusal, {name}", "ms", (1e3 * refusal_s,))
        num_others = sum(outcomes.others.values())
        yield Figure("other outcomes", "", (num_others,), note=str(dict(outcomes.others) or ""))


def run_client(host: str, port: int, rate: float, seconds: float) -> Outcomes:
    return asyncio.run(offer(host, port, rate, seconds))


async def offer(host: str, port: int, rate: float, seconds: float) -> Outcomes:
    """Send requests at a rate; count those that end after the queue has filled."""
    client, outcomes, tasks = HttpClient(host, port), Outcomes(), set[asyncio.Task[None]]()
    prompt = " ".join(["word"] * (PROMPT_CHARS // 5))
    starts_at = time.perf_counter() + FILL_S
    ends_at = starts_at + seconds

    async def send(number: int) -> None:
        body = {"prompt": f"{number} {prompt}", "max_tokens": OUTPUT_LEN, "ignore_eos": True}
        sent_at = time.perf_counter()
        try:
            status, headers = await client.post("/v1/completions", json.dumps(body).encode())
        except (OSError, EOFError) as error:
            status, headers = 0, {b"error": type(error).__name__.encode()}
        now = time.perf_counter()
        if not starts_at <= now < ends_at:
            return
        if status == 200:
            outcomes.num_good += 1
        elif status == 429 and int(headers.get(b"retry-after", b"0")) > 0:
            outcomes.refusals_s.append(now - sent_at)
        else:
            outcomes.others[str(status or headers[b"error"])] += 1

    number, next_at = 0, time.perf_counter()
    while next_at < ends_at:
        await asyncio.sleep(max(next_at - time.perf_counter(), 0))
        task = asyncio.create_task(send(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number, next_at = number + 1, next_at + 1 / rate
    for task in tasks:
        task.cancel()
    return outcomes


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second (default: 200)")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after the queue has filled")
    sys.exit(run(parser, measure))
