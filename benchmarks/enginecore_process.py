"""What a decode step costs the engine core's whole process, gRPC and frontend stream included: CPU / steps.

    python benchmarks/enginecore_process.py [--running 256] [--step-ms 20] [--seconds 10] [--rounds 3]

A simulated worker with fixed step times, the engine core as it is served, and one frontend's client in this
process, which reads every output. All requests decode while CPU time and steps of the engine are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.frontend.engines.client import EngineClient
from triptych.config import EngineConfig
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.outputs import FinishedRequest
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest, single_choice
from triptych.v1 import admin_pb2, admin_pb2_grpc

PROMPT_LEN = 128
READY_TIMEOUT_S = 60.0


class CountingSink:
    """Takes one request's outputs."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def on_admitted(self) -> None:
        pass

    def on_tokens(
        self, token_ids: list[int], logprobs: object, first_row: int, finish: FinishedRequest | None
    ) -> None:
        self.num_tokens += len(token_ids)

    def on_error(self, error: Exception) -> None:
        raise error

    def on_engine_lost(self, why: str) -> None:
        pass  # the end of the measurement


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _create(
    numbers: Sequence[int], *, prompt: NDArray[np.uint32], sampling: SamplingParams, seed: int
) -> SubmitRequest:
    return single_choice(numbers[0], str(seed), prompt, sampling, seed=seed)


async def measure(config: EngineConfig, pid: int, arguments: argparse.Namespace) -> list[tuple[float, int]]:
    """Per round: CPU milliseconds per step, and steps."""
    client = EngineClient(f"127.0.0.1:{config.engine.port}", frontend_id="benchmark", boot_id="benchmark")
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not client.is_ready:
            await asyncio.sleep(0.02)
    status = admin_pb2_grpc.AdminServiceStub(client.channel)
    rng = np.random.default_rng(0)
    sinks = []
    for number in range(arguments.running):
        length = PROMPT_LEN + number % config.cache.block_size  # uniform phases of the blocks
        sinks.append(sink := CountingSink())
        prompt = rng.integers(1000, 40_000, length, dtype=np.uint32)
        sampling = SamplingParams(max_tokens=7000, ignore_eos=True)
        create = functools.partial(_create, prompt=prompt, sampling=sampling, seed=number)
        client.submit(create, [sink])
    async with asyncio.timeout(READY_TIMEOUT_S):
        while min(sink.num_tokens for sink in sinks) < 2:
            await asyncio.sleep(0.05)
    rounds = []
    for _ in range(arguments.rounds):
        before, cpu_before = (await status.GetStatus(admin_pb2.GetStatusRequest())).status, cpu_s(pid)
        await asyncio.sleep(arguments.seconds)
        after, cpu_after = (await status.GetStatus(admin_pb2.GetStatusRequest())).status, cpu_s(pid)
        assert after.num_running == arguments.running, "requests ended while they were measured"
        num_steps = after.num_steps - before.num_steps
        rounds.append(((cpu_after - cpu_before) * 1e3 / num_steps, num_steps))
    running.cancel()
    await asyncio.wait([running])
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of a simulated step (default: 20)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per round (default: 10)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = config_from_overrides(
        {
            "simulation.enabled": True,
            "simulation.base_ms": arguments.step_ms,
            "simulation.prefill_token_us": 0,
            "simulation.decode_row_us": 0,
            "simulation.context_token_ns": 0,
            "max_num_seqs": arguments.running,
            "max_num_batched_tokens": arguments.running * (PROMPT_LEN + 16),
            "num_blocks": arguments.running * 512,
        }
    )
    cluster = LocalCluster(replace(config, frontend=replace(config.frontend, metrics_port=0)))
    cluster.start()
    try:
        cluster.wait_ready(READY_TIMEOUT_S)
        rounds = asyncio.run(measure(cluster.config, cluster.pids["enginecore"], arguments))
    finally:
        cluster.stop()
    milliseconds = [cost for cost, _ in rounds]
    print(
        f"{arguments.running} running, {sum(steps for _, steps in rounds)} steps: {np.median(milliseconds):.3f} ms "
        f"of CPU per step (median of {len(rounds)}; {min(milliseconds):.3f} to {max(milliseconds):.3f})"
    )


if __name__ == "__main__":
    main()
