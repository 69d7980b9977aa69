"""Measures what a hostile tenant costs another: p99 of its first tokens and gaps beside each attack, against alone.

The worker is simulated, with steps of 10 ms. The bystander has four clients that stream completions one after another:
short prompts, long ones, chats and forms. The hostile tenant sends one kind of request at a fixed rate, whether it is
answered or not, from a process of its own, which has written the requests before. The target is 1.5 for each ratio.

Everything shares the machine: on few cores the ratios hold the CPU time of both load generators, too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.stack.attacks import (
    ATTACKS,
    CHAT,
    COMPLETIONS,
    flood_headers,
    send_body,
    send_chat,
    write_body,
    write_chat,
)
from triptych.config.api_keys import entry_line

STEP_MS = 10.0
OUTPUT_LEN = 30
HOSTILE_KEY, BYSTANDER_KEY = "hostile-key", "bystander-key"
TARGET = 1.5
HEADERS, CONNECTIONS = "24 MiB of headers", "many connections"
GRPC_CHAT = "16,384 messages over gRPC"
_NUM_SENDERS = 32  # requests of the attack that may be under way at once
_MAX_BODIES = 120  # of an attack that are written; the first ones are sent again after that
_MAX_BODY_BYTES = 128 << 20  # of them together

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Once upon a time"}),
    (COMPLETIONS, {"prompt": "Once upon a time " * 400}),
    (CHAT, {"messages": [{"role": "user", "content": "Tell me a story"}]}),
    (COMPLETIONS, {"prompt": "Answer:", "structured_outputs": {"regex": "[a-z ]{200}"}}),
)


@dataclass(slots=True)
class Times:
    """Times that the bystander measured, in seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_failed: int = 0


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    names = arguments.attacks or [*ATTACKS, HEADERS, CONNECTIONS, GRPC_CHAT]
    with stack() as (address, grpc_address):
        watch(address, 2.0)  # warm up
        for _ in range(arguments.rounds):
            for name in names:
                alone = watch(address, arguments.seconds)
                with attacking(
                    grpc_address if name == GRPC_CHAT else address, name, arguments.rate
                ) as statuses:
                    beside = watch(address, arguments.seconds)
                yield from _figures(name, alone, beside, statuses())


@contextmanager
def stack() -> Iterator[tuple[str, str]]:
    """Run a stack with a key for each of the two tenants, and yield the addresses of HTTP and gRPC."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(
            "\n".join([entry_line("hostile", HOSTILE_KEY), entry_line("bystander", BYSTANDER_KEY), ""])
        )
        os.chmod(keys, 0o600)
        config = simulated_config(STEP_MS, **{"frontend.api_keys_file": str(keys)})
        with running(config) as cluster:
            yield cluster.http_address, cluster.address


def watch(address: str, seconds: float) -> Times:
    """Let the bystander's clients stream for so long, and return what they saw."""
    times, end = Times(), time.monotonic() + seconds

    def stream(path: str, body: dict[str, Any]) -> None:
        while time.monotonic() < end:
            _stream_one(address, path, body, times)

    threads = [threading.Thread(target=stream, args=each) for each in BODIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def _stream_one(address: str, path: str, body: dict[str, Any], times: Times) -> None:
    fields = {"model": "embedded", "max_tokens": OUTPUT_LEN, "min_tokens": OUTPUT_LEN, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {BYSTANDER_KEY}"}
    connection = http.client.HTTPConnection(address, timeout=120)
    sent_s = last_s = time.perf_counter()
    num_tokens = 0
    try:
        connection.request("POST", path, json.dumps({**fields, **body}), headers)
        response = connection.getresponse()
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            (times.gaps_s if num_tokens else times.first_s).append(now_s - last_s)
            last_s, num_tokens = now_s, num_tokens + 1
        times.num_failed += response.status != 200 or not num_tokens
    except (OSError, http.client.HTTPException):
        times.num_failed += 1
        times.first_s.append(time.perf_counter() - sent_s)
    finally:
        connection.close()


@contextmanager
def attacking(address: str, name: str, rate: float) -> Iterator[Callable[[], dict[str, int]]]:
    """Attack during the block; the function that is yielded returns the answers by status, after the block."""
    pipe, child_end = multiprocessing.Pipe()
    sender = multiprocessing.Process(target=_attack, args=(address, name, rate, child_end))
    sender.start()
    child_end.close()
    statuses: dict[str, int] = {}
    try:
        assert pipe.poll(120), "it writes its requests"
        pipe.recv()
        time.sleep(0.5)
        yield lambda: statuses
    finally:
        pipe.send("stop")
        if pipe.poll(150):
            statuses.update(pipe.recv())
        sender.join(5)
        sender.kill()


def _attack(address: str, name: str, rate: float, pipe: Connection) -> None:
    """Send at a fixed rate until `pipe` says stop. Runs in a process of its own."""
    statuses: dict[str, int] = {}
    held: list[http.client.HTTPConnection] = []
    lock = threading.Lock()
    bodies = _write_bodies(name)
    pipe.send("ready")

    def send_one(number: int) -> None:
        try:
            if name == HEADERS:
                status = flood_headers(address, 24 << 20)[9:12].decode() or "closed"
            elif name == CONNECTIONS:
                connection = http.client.HTTPConnection(address, timeout=5)
                connection.connect()
                with lock:
                    held.append(connection)
                status = "open"
            elif name == GRPC_CHAT:
                status = send_chat(address, bodies[number % len(bodies)], HOSTILE_KEY)
            else:
                body = bodies[number % len(bodies)]
                status = str(send_body(address, ATTACKS[name].path, body, HOSTILE_KEY))
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        with lock:
            statuses[status] = statuses.get(status, 0) + 1

    per_turn = 20 if name == CONNECTIONS else 1  # they cost little each
    with ThreadPoolExecutor(_NUM_SENDERS) as pool:
        number = -1
        waiting: list[Future[None]] = []
        while not pipe.poll(1 / rate):
            waiting = [each for each in waiting if not each.done()]
            for _ in range(per_turn if len(waiting) < _NUM_SENDERS else 0):
                number += 1
                waiting.append(pool.submit(send_one, number))
    pipe.send(statuses)


def _write_bodies(name: str) -> list[bytes]:
    """Write the bodies of an attack before it begins: the time that this takes is no part of it."""
    if name not in ATTACKS and name != GRPC_CHAT:
        return []
    first = int(time.time()) % 1_000_000 * 1000  # no other run has sent them
    bodies: list[bytes] = []
    while len(bodies) < _MAX_BODIES and sum(map(len, bodies)) < _MAX_BODY_BYTES:
        number = first + len(bodies)
        bodies.append(write_chat(number) if name == GRPC_CHAT else write_body(ATTACKS[name], number))
    return bodies


def _figures(name: str, alone: Times, beside: Times, statuses: dict[str, int]) -> Iterator[Figure]:
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    for what, alone_s, beside_s in (
        ("first token", alone.first_s, beside.first_s),
        ("gap", alone.gaps_s, beside.gaps_s),
    ):
        before, during = (1e3 * float(np.percentile(each, 99)) for each in (alone_s, beside_s))
        yield Figure(f"{name}: p99 {what}, alone", "ms", (before,))
        yield Figure(f"{name}: p99 {what}, beside", "ms", (during,), note=answers)
        yield Figure(f"{name}: {what}, beside / alone", "", (during / before,), note=f"target {TARGET}")
    yield Figure(f"{name}: failed streams of the bystander", "", (float(beside.num_failed),))


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests of the attack per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--attacks", nargs="*", metavar="NAME", help="some of them (default: all)")
    sys.exit(run(parser, measure))
