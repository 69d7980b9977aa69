"""Kills a worker with SIGKILL under load: tokens lost, repeated or changed, and how long clients wait.

Three processes, real clients. All streams run twice, undisturbed and with kills spread over the run. Half of them are
greedy, half sampled with a seed. Real weights are computed in float32, where a different batch flips a token only at
a near tie; the first difference of each stream is noted with the gap between its two best logits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.harness.cluster import running
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.client.grpc_client import GenerationClient
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import open_channel
from triptych.types.events import DeltaEvent
from triptych.types.facts import Phase
from triptych.types.outputs import TokenLogprobs

PROMPT_LENS = (24, 128)
DEADLINE_S = 900.0


@dataclass(slots=True)
class Stream:
    """One client's answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    longest_gap_s: float = 0.0

    async def follow(self, client: GenerationClient, number: int, sampling: dict[str, Any]) -> None:
        rng = np.random.default_rng(number)
        prompt = rng.integers(1000, 40_000, rng.integers(*PROMPT_LENS)).tolist()
        sampling |= {"temperature": float(number % 2), "ignore_eos": True, "seed": number}
        last_s = time.monotonic()
        async for event in client.generate(prompt, sampling, timeout_s=DEADLINE_S):
            if isinstance(event, DeltaEvent):
                now_s = time.monotonic()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                self.token_ids += event.token_ids
                self.logprobs += event.logprobs


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    overrides: dict[str, Any] = {"model.model": arguments.model, "max_num_seqs": arguments.streams}
    overrides |= {"simulation.enabled": True} if arguments.sim else {"dtype": "float32"}
    for _ in range(arguments.rounds):
        with running(config_from_overrides(overrides)) as cluster:
            undisturbed, _ = asyncio.run(all_streams(cluster, arguments, num_kills=0))
            disturbed, restarts_s = asyncio.run(all_streams(cluster, arguments, num_kills=arguments.kills))
        title = f"{arguments.streams} streams of {arguments.tokens} tokens, {arguments.kills} kills"
        pairs = list(zip(undisturbed, disturbed, strict=True))
        missing = sum(len(after.token_ids) < len(before.token_ids) for before, after in pairs)
        repeated = sum(len(after.token_ids) > len(before.token_ids) for before, after in pairs)
        differences = [text for before, after in pairs if (text := first_difference(before, after))]
        for name, count in (("lost tokens", missing), ("got tokens twice", repeated)):
            error = f"{count} streams {name}" if count else ""
            yield Figure(f"{title}: streams that {name}", "", (count,), error=error)
        note = "; ".join(differences)
        yield Figure(f"{title}: streams that got another token", "", (len(differences),), note=note)
        gaps_s = [stream.longest_gap_s for stream in disturbed]
        yield Figure(f"{title}: longest silence, median stream", "s", (float(np.median(gaps_s)),))
        yield Figure(f"{title}: longest silence, worst stream", "s", (max(gaps_s),))
        yield Figure(f"{title}: longest restart, kill to ready", "s", (max(restarts_s),))
        yield Figure(f"{title}: longest silence beyond the restart", "s", (max(gaps_s) - max(restarts_s),))


async def all_streams(
    cluster: LocalCluster, arguments: argparse.Namespace, *, num_kills: int
) -> tuple[list[Stream], list[float]]:
    """Run all streams, and kill the worker whenever they have reached the next of equal parts of their tokens.

    Returns:
        The streams, and the seconds from each kill until a worker is ready again.
    """
    restarts_s: list[float] = []
    streams = [Stream() for _ in range(arguments.streams)]
    sampling: dict[str, Any] = {"max_tokens": arguments.tokens} | ({} if arguments.sim else {"logprobs": 2})

    async def kill() -> None:
        for part in range(1, num_kills + 1):
            num_tokens = part / (num_kills + 1) * arguments.tokens * arguments.streams
            while sum(len(stream.token_ids) for stream in streams) < num_tokens:
                await asyncio.sleep(0.005)
            os.kill(cluster.pids["worker"], signal.SIGKILL)
            restarts_s.append(await time_to_ready(cluster))

    async with GenerationClient(cluster.address) as client, asyncio.TaskGroup() as group:
        group.create_task(kill())
        for number, stream in enumerate(streams):
            group.create_task(stream.follow(client, number, dict(sampling)))
    return streams, restarts_s


async def time_to_ready(cluster: LocalCluster) -> float:
    """Wait until the worker that was killed just now is ready again, and return the seconds that it took."""
    killed_s = time.monotonic()
    while True:
        async with open_channel(cluster.config.engine.worker_address) as channel:
            try:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                response = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=0.5)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
                continue
        if response.info.phase == Phase.READY:
            return time.monotonic() - killed_s
        await asyncio.sleep(0.02)


def first_difference(before: Stream, after: Stream) -> str:
    """Describe the first token that differs; empty if none does."""
    pairs = enumerate(zip(before.token_ids, after.token_ids, strict=False))
    place = next((place for place, (old, new) in pairs if old != new), None)
    if place is None:
        return ""
    if not before.logprobs:
        return f"at {place}"
    best = sorted((entry.logprob for entry in before.logprobs[place].top), reverse=True)
    return f"at {place}, {best[0] - best[1]:.1e} between the two best logits"


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=1)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--sim", action="store_true", help="simulate the model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: 200)")
    parser.add_argument("--kills", type=int, default=3)
    sys.exit(run(parser, measure))
