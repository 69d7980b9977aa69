"""What one client that never reads costs the others: p99 gap between deltas of 31 readers, in turn with and without.

    python benchmarks/stalled_reader.py [--rounds 5]

Both cases run 32 streams of equal length; in one of them the 32nd is admitted and never read again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np

from triptych.client.grpc_client import GenerationClient
from triptych.config.loader import load_config
from triptych.launcher.launch import launch
from triptych.types.events import DeltaEvent

NUM_READERS = 32
OUTPUT_LEN = 96
_PORTS = (
    "frontend.port",
    "frontend.http_port",
    "frontend.metrics_port",
    "engine.port",
    "engine.metrics_port",
    "worker.port",
    "worker.metrics_port",
)


async def p99_gap_s(address: str, *, is_stalled: bool, seed: int) -> float:
    """Over all readers but the last, whose stream is read or not."""
    sampling = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "seed": seed}
    gaps: list[float] = []
    async with GenerationClient(address) as last_client, GenerationClient(address) as client:

        async def read(number: int) -> None:
            last_at = None
            async for event in client.generate([seed, number, 11], sampling):
                if isinstance(event, DeltaEvent):
                    now = time.perf_counter()
                    if last_at is not None:
                        gaps.append(now - last_at)
                    last_at = now

        async def drain() -> None:
            async for _ in last:
                pass

        last = last_client.generate([seed, NUM_READERS, 11], sampling)
        await anext(last)
        readers = [read(number) for number in range(NUM_READERS - 1)]
        await asyncio.gather(*readers, *([] if is_stalled else [drain()]))
        await last.aclose()
    return float(np.percentile(gaps, 99))


async def measure(address: str, num_rounds: int) -> None:
    await p99_gap_s(address, is_stalled=False, seed=1)  # warm up
    ratios = []
    for number in range(num_rounds):
        alone = await p99_gap_s(address, is_stalled=False, seed=2 + number)
        beside = await p99_gap_s(address, is_stalled=True, seed=2 + number)
        ratios.append(beside / alone)
        print(f"round {number + 1}: p99 gap {alone * 1e3:.1f} ms all read, {beside * 1e3:.1f} ms one stalled")
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cluster = launch(load_config(flags=dict.fromkeys(_PORTS, "0") | {"log.level": "warning"}))
    try:
        asyncio.run(measure(cluster.address, arguments.rounds))
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
