"""Measures the resident memory of each process while a stack serves mixed traffic.

Sixteen clients, each with one request after the other: prompts of 32 to 1,024 random tokens, answers of 16 to 128. One
prompt in twenty begins with one of five prefixes of 64 tokens. One answer in four is followed by a second turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

from benchmarks.harness.cluster import running
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import resident_bytes
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.launch import config_from_overrides
from triptych.types.events import DeltaEvent

NUM_CLIENTS = 16
SAMPLE_S = 60.0


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_overrides(dict(option.split("=", 1) for option in arguments.options))
    spawn = get_context("spawn")
    with running(config) as cluster, ProcessPoolExecutor(1, mp_context=spawn) as client:
        yield from _sizes(cluster.pids, "ready")
        started_s = time.monotonic()
        traffic = client.submit(run_clients, cluster.address, 60 * arguments.minutes)
        num_samples = max(round(60 * arguments.minutes / SAMPLE_S), 1)
        for number in range(1, num_samples + 1):
            at_s = number * 60 * arguments.minutes / num_samples
            time.sleep(max(started_s + at_s - time.monotonic(), 0))
            yield from _sizes(cluster.pids, f"{at_s / 60:g} min")
        num_requests, num_tokens = traffic.result()
        yield Figure("requests", "", (num_requests,))
        yield Figure("tokens of prompts and answers", "", (num_tokens,))


def _sizes(pids: Mapping[str, int], when: str) -> Iterator[Figure]:
    for name, pid in pids.items():
        yield Figure(f"{name}, {when}", "MB", (resident_bytes(pid) / 1e6,))


def run_clients(address: str, seconds: float) -> tuple[int, int]:
    """Return the number of requests that ended within `seconds`, and of the tokens of these."""
    return asyncio.run(_run_clients(address, seconds))


async def _run_clients(address: str, seconds: float) -> tuple[int, int]:
    ends_at = time.monotonic() + seconds
    num_requests = num_tokens = 0
    prefixes_random = Random(0)
    async with GenerationClient(address) as client:
        vocab_size = (await client.list_models())[0].vocab_size
        prefixes = [prefixes_random.choices(range(3, vocab_size), k=64) for _ in range(5)]

        async def one_client(random: Random) -> None:
            nonlocal num_requests, num_tokens
            turn: list[int] = []
            while time.monotonic() < ends_at:
                prompt = turn or (random.choice(prefixes) if random.random() < 0.05 else [])
                prompt = prompt + random.choices(range(3, vocab_size), k=random.randint(32, 1024))
                token_ids: list[int] = []
                sampling = {"temperature": 0.0, "max_tokens": random.randint(16, 128), "ignore_eos": True}
                async for event in client.generate(prompt, sampling):
                    if isinstance(event, DeltaEvent):
                        token_ids += event.token_ids
                num_requests, num_tokens = num_requests + 1, num_tokens + len(prompt) + len(token_ids)
                turn = prompt + token_ids if not turn and random.random() < 0.25 else []

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(one_client(Random(number + 1)))
    return num_requests, num_tokens


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument(
        "options",
        nargs="*",
        metavar="OPTION=VALUE",
        help="of the stack, as model.quantization=q4 or cache.soft_memory_fraction=1",
    )
    sys.exit(run(parser, measure))
