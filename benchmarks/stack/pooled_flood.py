"""Measures what a flood of texts for vectors costs a chat on the same decoder: p99 of its gaps, beside and alone.

The bystander has one chat after another, streamed. The other tenant asks for the vectors of 2,000 texts of 500 tokens
in each call, four calls at a time, from a process of its own: more than the model computes while it is measured. The
calls end with the measurement. The target is 2.0 for the ratio of the gaps. Texts per second are those of the engine,
by the tokens that it has planned beyond the chat's.

Everything shares the machine: on few cores the ratios hold the CPU time of the load, too.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.client.admin_client import AdminClient
from triptych.config import EngineConfig
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.local_cluster import LocalCluster

TARGET = 2.0
OUTPUT_LEN = 64
_NUM_CALLS = 4  # of the flood, at a time
_WORDS = ("river", "market", "signal", "garden", "winter", "letter", "engine", "harbor", "mirror", "copper")


@dataclass(slots=True)
class Times:
    """Times that the chats measured, in seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    with running(_config(arguments)) as cluster:
        address = cluster.http_address
        watch(address, 2.0)  # warm up
        for _ in range(arguments.rounds):
            alone = watch(address, arguments.seconds)
            with flooding(address, arguments.texts, arguments.tokens):
                before, started = _num_tokens(cluster), time.monotonic()
                beside = watch(address, arguments.seconds)
                num_pooled = _num_tokens(cluster) - before - len(beside.gaps_s)
                elapsed_s = time.monotonic() - started
            yield from _figures(alone, beside)
            yield Figure("tokens of texts beside", "1/s", (num_pooled / elapsed_s,))


def watch(address: str, seconds: float) -> Times:
    """Stream one chat after another for so long, and return what they saw."""
    times, end = Times(), time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        _stream_one(address, f"Tell me story {number}", times, end)
    return times


@contextmanager
def flooding(address: str, num_texts: int, num_tokens: int) -> Iterator[None]:
    """Ask for vectors during the block, from a process of its own."""
    sender = multiprocessing.Process(target=_flood, args=(address, num_texts, num_tokens))
    sender.start()
    try:
        time.sleep(3.0)  # the texts are written and tokenized
        yield
    finally:
        sender.kill()
        sender.join()
        time.sleep(1.0)  # its requests end


def _config(arguments: argparse.Namespace) -> EngineConfig:
    if arguments.step_ms:
        return simulated_config(arguments.step_ms)
    return config_from_overrides({"model.model": arguments.model})


def _stream_one(address: str, prompt: str, times: Times, end: float) -> None:
    body = {
        "messages": [{"role": "user", "content": prompt}], "stream": True, "user": "bystander",
        "max_tokens": OUTPUT_LEN, "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(address, timeout=120)
    last_s = time.perf_counter()
    is_first = True
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the chat was answered by {response.status}: {response.read()!r}")
    for line in response:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            now_s = time.perf_counter()
            (times.first_s if is_first else times.gaps_s).append(now_s - last_s)
            last_s, is_first = now_s, False
        if time.monotonic() > end and times.gaps_s:
            break
    connection.close()


def _flood(address: str, num_texts: int, num_tokens: int) -> None:
    """Call without end. Runs in a process of its own, which is killed."""

    def call(number: int) -> None:
        choose = np.random.default_rng(number)
        texts = [" ".join(choose.choice(_WORDS, num_tokens)) for _ in range(num_texts)]
        body = json.dumps({"input": texts, "user": "flood", "truncate_prompt_tokens": num_tokens})
        while True:
            connection = http.client.HTTPConnection(address, timeout=3600)
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                time.sleep(0.1)
            connection.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(_NUM_CALLS)]
    for thread in threads:
        thread.start()


def _num_tokens(cluster: LocalCluster) -> int:
    """Return the tokens that the engine has planned so far."""

    async def ask() -> int:
        admin = AdminClient(cluster.admin_address)
        try:
            return sum(status.counters.num_scheduled_tokens for _, status in await admin.status())
        finally:
            await admin.close()

    return asyncio.run(ask())


def _figures(alone: Times, beside: Times) -> Iterator[Figure]:
    for what, alone_s, beside_s in (
        ("first token", alone.first_s, beside.first_s),
        ("gap", alone.gaps_s, beside.gaps_s),
    ):
        for percent in (50, 99):
            before, during = (1e3 * float(np.percentile(each, percent)) for each in (alone_s, beside_s))
            yield Figure(f"p{percent} {what}, alone", "ms", (before,))
            yield Figure(f"p{percent} {what}, beside", "ms", (during,))
            note = f"target {TARGET}" if (what, percent) == ("gap", 99) else ""
            yield Figure(f"p{percent} {what}, beside / alone", "", (during / before,), note=note)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--model", default="embedded")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="simulate steps of this time; 0: compute the model"
    )
    parser.add_argument("--texts", type=int, default=2000, help="of one call of the flood")
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    sys.exit(run(parser, measure))
