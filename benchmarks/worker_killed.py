"""A worker killed -9 under load: how many tokens are lost, repeated or changed, and how long clients wait.

    python benchmarks/worker_killed.py [--streams 64] [--kills 3] [--model embedded | --sim]

Three processes, real clients. All streams run twice, undisturbed and with kills spread over the run; half of them
are greedy, half sampled with a seed. Real weights are computed in float32, where a different batch flips a token
only at a near-tie; the first difference of each stream is shown with the gap between its two best logits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.client.grpc_client import GenerationClient
from triptych.launcher.launch import config_from_overrides, launch
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent
from triptych.types.outputs import TokenLogprobs

PROMPT_LENS = (24, 128)
DEADLINE_S = 900.0


@dataclass
class Stream:
    """What one client saw."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    longest_gap_s: float = 0.0


async def follow(
    client: GenerationClient, number: int, max_tokens: int, with_gaps: bool, progress: list[int]
) -> Stream:
    rng = np.random.default_rng(number)
    prompt = rng.integers(1000, 40_000, rng.integers(*PROMPT_LENS)).tolist()
    sampling: dict[str, Any] = {
        "temperature": 1.0 if number % 2 else 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
    }
    if with_gaps:
        sampling["logprobs"] = 2
    stream, last = Stream(), time.monotonic()
    async for event in client.generate(prompt, sampling, timeout_s=DEADLINE_S):
        if isinstance(event, DeltaEvent):
            now = time.monotonic()
            stream.longest_gap_s, last = max(stream.longest_gap_s, now - last), now
            stream.token_ids += event.token_ids
            stream.logprobs += event.logprobs
            progress[number] = len(stream.token_ids)
    return stream


async def kill_at(cluster: LocalCluster, progress: list[int], shares: list[float], max_tokens: int) -> int:
    """Kill the worker when the mean stream has reached each share of its tokens; how often it was done."""
    num_kills = 0
    for share in shares:
        while sum(progress) < share * max_tokens * len(progress):
            await asyncio.sleep(0.005)
        os.kill(cluster.pids["worker"], signal.SIGKILL)
        num_kills += 1
    return num_kills


async def run(
    cluster: LocalCluster, arguments: argparse.Namespace, num_kills: int
) -> tuple[list[Stream], int]:
    progress = [0] * arguments.streams
    async with GenerationClient(cluster.address) as client:
        shares = [(kill + 1) / (num_kills + 1) for kill in range(num_kills)]
        killer = asyncio.create_task(kill_at(cluster, progress, shares, arguments.tokens))
        streams = await asyncio.gather(
            *(
                follow(client, number, arguments.tokens, not arguments.sim, progress)
                for number in range(arguments.streams)
            )
        )
        return streams, await killer


def compare(undisturbed: list[Stream], killed: list[Stream]) -> tuple[int, int, int]:
    """Streams with tokens missing, streams with tokens too many, streams with another token somewhere."""
    num_short = num_long = num_changed = 0
    for number, (before, after) in enumerate(zip(undisturbed, killed, strict=True)):
        num_short += len(after.token_ids) < len(before.token_ids)
        num_long += len(after.token_ids) > len(before.token_ids)
        pairs = zip(before.token_ids, after.token_ids, strict=False)
        place = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if place is None:
            continue
        num_changed += 1
        gap = ""
        if before.logprobs:
            best = sorted((entry.logprob for entry in before.logprobs[place].top), reverse=True)
            gap = f", {best[0] - best[1]:.1e} between the two best logits there"
        print(f"  stream {number} differs from token {place} on{gap}")
    return num_short, num_long, num_changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--sim", action="store_true", help="simulate the model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: 200)")
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    overrides: dict[str, Any] = {"model.model": arguments.model, "max_num_seqs": arguments.streams}
    overrides |= {"simulation.enabled": True} if arguments.sim else {"dtype": "float32"}
    cluster = launch(config_from_overrides(overrides))
    try:
        undisturbed, _ = asyncio.run(run(cluster, arguments, 0))
        killed, num_kills = asyncio.run(run(cluster, arguments, arguments.kills))
    finally:
        cluster.stop()
    num_short, num_long, num_changed = compare(undisturbed, killed)
    gaps = sorted(stream.longest_gap_s for stream in killed)
    print(
        f"{arguments.streams} streams of {arguments.tokens} tokens, worker killed {num_kills} times: "
        f"{num_short} streams lost tokens, {num_long} got some twice, {num_changed} got another one; "
        f"longest silence {gaps[len(gaps) // 2]:.1f} s at the median, {gaps[-1]:.1f} s at most"
    )
    sys.exit(1 if num_short or num_long else 0)


if __name__ == "__main__":
    main()
