"""Measures what a client that never reads costs the others: p99 gap between deltas of 31 readers, with and without.

Both cases run 32 streams of equal length, in turn. In one of them the 32nd is admitted and never read again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator

from benchmarks.harness.cluster import running
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.stack.streams import p99_gap_s, sampling
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.launch import config_from_overrides

NUM_STREAMS = 32
OUTPUT_LEN = 96


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    with running(config_from_overrides({})) as cluster:
        asyncio.run(gap_s(cluster.address, is_stalled=False, seed=1))  # warm up
        for seed in range(2, arguments.rounds + 2):
            all_read_s = asyncio.run(gap_s(cluster.address, is_stalled=False, seed=seed))
            one_stalled_s = asyncio.run(gap_s(cluster.address, is_stalled=True, seed=seed))
            yield Figure("p99 gap, all streams read", "ms", (1e3 * all_read_s,))
            yield Figure("p99 gap, one stream stalled", "ms", (1e3 * one_stalled_s,))
            yield Figure("p99 gap, one stalled / all read", "", (one_stalled_s / all_read_s,))


async def gap_s(address: str, *, is_stalled: bool, seed: int) -> float:
    """Return the p99 gap of all readers but the last, whose stream is read or not."""
    async with GenerationClient(address) as last_client, GenerationClient(address) as client:
        last = last_client.generate([seed, NUM_STREAMS, 11], sampling(OUTPUT_LEN, seed))
        await anext(last)

        async def drain() -> None:
            async for _ in last:
                pass

        drained = None if is_stalled else asyncio.create_task(drain())
        p99_s = await p99_gap_s(client, NUM_STREAMS - 1, OUTPUT_LEN, seed=seed)
        if drained is not None:
            await drained
        await last.aclose()
    return p99_s


if __name__ == "__main__":
    sys.exit(run(create_parser(__doc__, rounds=5), measure))
