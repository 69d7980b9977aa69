"""Measures a decode step's cost to the engine core's whole process, gRPC and frontend stream included.

A simulated worker with fixed step times, the engine core as it is served, and one frontend's client in this
process, which reads every output. All requests decode while CPU time and steps of the engine are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import Iterator, Sequence

from benchmarks.engine.requests import BLOCK_SIZE, PROMPT_LEN, decoding_submits
from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.outputs import FinishedRequest
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest, single_choice
from triptych_services.frontend.engines.client import EngineClient

READY_TIMEOUT_S = 60.0


class CountingSink:
    """Counts one request's tokens."""

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


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(
        arguments.step_ms,
        max_num_seqs=arguments.running,
        max_num_batched_tokens=arguments.running * (PROMPT_LEN + BLOCK_SIZE),
        num_blocks=arguments.running * 512,
    )
    title = f"{arguments.running} running, steps of {arguments.step_ms:g} ms"
    with running(config) as cluster:
        for cpu_s, num_steps in asyncio.run(measure_rounds(cluster, arguments)):
            note = f"{num_steps} steps a round"
            yield Figure(f"{title}, CPU per step", "ms", (1e3 * cpu_s / num_steps,), note=note)


async def measure_rounds(cluster: LocalCluster, arguments: argparse.Namespace) -> list[tuple[float, int]]:
    """Return CPU seconds and steps of the engine in each round."""
    pid = cluster.pids["enginecore"]
    address = f"127.0.0.1:{cluster.config.engine.port}"
    client = EngineClient(address, frontend_id="benchmark", boot_id="benchmark")
    task = asyncio.create_task(client.run())
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not client.is_ready:
            await asyncio.sleep(0.02)
    admin = admin_pb2_grpc.AdminServiceStub(client.channel)
    sinks = []
    for submit in decoding_submits(arguments.running, SamplingParams(max_tokens=7000, ignore_eos=True)):
        sinks.append(sink := CountingSink())
        client.submit(functools.partial(_numbered, submit=submit), [sink])  # type: ignore[list-item]
    async with asyncio.timeout(READY_TIMEOUT_S):
        while min(sink.num_tokens for sink in sinks) < 2:
            await asyncio.sleep(0.05)
    rounds = []
    for _ in range(arguments.rounds):
        before = (await admin.GetStatus(admin_pb2.GetStatusRequest())).status
        cpu_before_s = cpu_seconds(descendants([pid]))
        await asyncio.sleep(arguments.seconds)
        after = (await admin.GetStatus(admin_pb2.GetStatusRequest())).status
        cpu_s = cpu_seconds(descendants([pid])) - cpu_before_s
        assert after.num_running == arguments.running, "requests ended while they were measured"
        rounds.append((cpu_s, after.num_steps - before.num_steps))
    task.cancel()
    await asyncio.wait([task])
    return rounds


def _numbered(numbers: Sequence[int], *, submit: SubmitRequest) -> SubmitRequest:
    """Return the request under the number that the session has given it."""
    seed = int(submit.seeds[0])
    return single_choice(numbers[0], submit.request_id, submit.prompt_token_ids, submit.sampling, seed=seed)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of a simulated step (default: 20)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per round (default: 10)")
    sys.exit(run(parser, measure))
