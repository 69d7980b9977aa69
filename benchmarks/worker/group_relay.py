"""Measures what it costs a leader to relay steps to the other ranks of its group.

    python -m benchmarks.worker.group_relay [--followers 3]

Followers are processes of their own; they decode the steps and compute nothing. The leader relays on its event loop,
while its runner thread computes an earlier step, so the first figure is no part of a step unless the loop is full. The
second is from a relayed call to the last answer: two hops.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import uvloop

from benchmarks.harness.command import create_parser, module_command, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Child
from triptych.config import EngineConfig, ParallelConfig, WorkerConfig
from triptych.types.facts import SleepLevel
from triptych.types.step import StepPlan
from triptych.wire.step import Step, plan_to_proto
from triptych_services.worker.group.follower import GroupFollower
from triptych_services.worker.group.leader import GroupLeader
from triptych_services.worker.group.messages import LeaderMessage

NUM_STEPS = 2000
PACE_S = 0.002
_EVERY = 16  # streams of so many enter a new block in a step


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        yield from uvloop.run(_measure(arguments.followers))


async def _measure(num_followers: int) -> list[Figure]:
    parallel = ParallelConfig(tensor_parallel_size=num_followers + 1, rendezvous_address="127.0.0.1:0")
    leader = GroupLeader(parallel, generation="benchmark", on_leaving=lambda: None)
    port = await leader.open()
    with ExitStack() as stack:
        for rank in range(1, num_followers + 1):
            command = module_command(
                "benchmarks.worker.group_relay", "--rank", rank, "--port", port, "--followers", num_followers
            )
            stack.enter_context(Child(command))
        await leader.gather()
        step = plan_to_proto(
            StepPlan(
                step_id=1,
                last_result_seen=0,
                block_slots=np.arange(64 // _EVERY, dtype=np.uint32),
                block_ids=np.arange(64 // _EVERY, dtype=np.uint32),
                num_tokens=64,
            )
        )
        relay_us, call_us = [], []
        for _ in range(NUM_STEPS):
            began = time.perf_counter_ns()
            leader.relay(LeaderMessage(step=step))
            await asyncio.sleep(0)  # uvloop writes at the end of a turn
            relay_us.append((time.perf_counter_ns() - began) / 1e3)
            await asyncio.sleep(PACE_S)
        for _ in range(NUM_STEPS // 10):
            began = time.perf_counter_ns()
            await leader.finish_call(leader.begin_call(wake=True))
            call_us.append((time.perf_counter_ns() - began) / 1e3)
            await asyncio.sleep(PACE_S)
        await leader.leave()
    title = f"{num_followers} followers"
    return [
        Figure(
            f"{title}, one step of 64 streams relayed",
            "us",
            (statistics.median(relay_us),),
            less_is_better=True,
        ),
        Figure(
            f"{title}, a call until all have answered",
            "us",
            (statistics.median(call_us),),
            less_is_better=True,
        ),
    ]


class _IdleThread:
    """Takes what a runner thread takes, and computes nothing."""

    def open_session(self, deliver: Any) -> int:
        return 1

    def submit(self, session: int, plan: StepPlan, message: Step) -> None:
        return

    async def sleep(self, level: SleepLevel) -> int:
        return 0

    async def wake(self) -> None:
        return


async def _follow(arguments: argparse.Namespace) -> None:
    config = EngineConfig(
        parallel=ParallelConfig(
            tensor_parallel_size=arguments.followers + 1, rendezvous_address=f"127.0.0.1:{arguments.port}"
        ),
        worker=WorkerConfig(rank=arguments.rank),
    )
    follower = GroupFollower(config, on_result=lambda result: None)
    await follower.follow(_IdleThread())  # type: ignore[arg-type]


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        uvloop.run(_follow(given))
        sys.exit()
    sys.exit(run(parser, measure))
