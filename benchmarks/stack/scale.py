"""Measures what a frontend pays for each engine, batch, token and stream, and from that what a million streams need.

Many engines with simulated accelerators run on this machine at slowed time, so that nothing waits for a core:
a step takes `--step-s` of wall time, and what each part costs is read from the CPU time of its process. The frontend is
the real one, connected to every engine. Each load runs with one public message per token, and with none until the end
(`min_interval_tokens`), so that the parts of the frontend's time come apart:

    CPU time above that of an idle frontend = batches from engines x a + tokens x b + messages to clients x c
    memory = engines x d + streams x e

The plan at the end applies them to `--plan-streams` streams of steps of `--plan-step-ms`. Without streams, as in
`--loads 1000x0`, only what idle engines cost is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import grpc.aio
import numpy as np

from benchmarks.harness.command import create_parser, module_command, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants, resident_bytes
from benchmarks.harness.processes import Child
from benchmarks.routing.engines import POLL_S, START_S, start_frontend, wait_ports
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.launcher.process import ServiceProcess
from triptych.v1 import generation_pb2

_METHOD = "/triptych.v1.GenerationService/StreamGenerate"
_NUM_HOSTS = 4
_PROMPT_LEN = 16
_OUTPUT_LEN = 200
_NEVER = 1 << 20
_SETTLE_S = 5.0  # a frontend reads the model's tokenizer when its first engine is there
_IDLE_S = 10.0  # in which each engine tells its counters once, though they stay the same


class Load(NamedTuple):
    """Load on one frontend."""

    num_engines: int
    num_streams: int
    """Streams of all engines together."""
    has_messages: bool
    """Each token leaves by itself; otherwise all leave at the end."""

    def __str__(self) -> str:
        kind = "each token a message" if self.has_messages else "no messages"
        return f"{self.num_engines} engines, {self.num_streams} streams, {kind}"


class Costs(NamedTuple):
    """Counts and costs of a load, over the time that was measured."""

    num_batches: int
    num_tokens: int
    frontend_cpu_s: float
    """CPU time, like the next: above what they take while nothing runs."""
    engines_cpu_s: float
    idle_share: float
    """Share of a core that the frontend takes while nothing runs."""
    connect_s: float
    connected_mb: float
    """Memory of the frontend when it is connected to every engine."""
    streaming_mb: float
    """Memory when all streams run."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    measured: dict[Load, Costs] = {}
    for text in arguments.loads:
        num_engines, streams_per_engine = map(int, text.split("x"))
        if not streams_per_engine:
            load = Load(num_engines, 0, False)
            yield from _idle_figures(f"{num_engines} engines", measure_load(load, arguments))
            continue
        for has_messages in (True, False):
            load = Load(num_engines, num_engines * streams_per_engine, has_messages)
            costs = measured[load] = measure_load(load, arguments)
            us_per_token = 1e6 * costs.frontend_cpu_s / costs.num_tokens
            us_per_step = 1e6 * costs.engines_cpu_s / costs.num_batches
            yield Figure(f"{load}: frontend, CPU per token", "us", (us_per_token,), less_is_better=True)
            yield Figure(f"{load}: engine, CPU per step", "us", (us_per_step,), less_is_better=True)
            yield from _idle_figures(str(load), costs)
    if measured:
        yield from plan(arguments, fit(measured))


def _idle_figures(title: str, costs: Costs) -> Iterator[Figure]:
    yield Figure(f"{title}: frontend, idle share of a core", "", (costs.idle_share,), less_is_better=True)
    yield Figure(f"{title}: all engines connected", "s", (costs.connect_s,), less_is_better=True)


def measure_load(load: Load, arguments: argparse.Namespace) -> Costs:
    """Start the engines and one frontend, run the streams, and take the difference of the counters."""
    with ExitStack() as stack:
        hosts, ports = start_engines(stack, load, arguments)
        began_at = time.monotonic()
        frontend = start_frontend(stack, ports)
        return asyncio.run(run_streams(load, frontend, hosts, arguments, began_at))


def start_engines(
    stack: ExitStack, load: Load, arguments: argparse.Namespace
) -> tuple[list[Child], list[int]]:
    """Start the engines in a few processes; return these and the ports of all engines."""
    hosts, ports = [], []
    shares = [len(part) for part in np.array_split(np.arange(load.num_engines), _NUM_HOSTS) if len(part)]
    for number, share in enumerate(shares):
        first = sum(shares[:number])
        num_streams = max(1, load.num_streams // load.num_engines)
        command = module_command("benchmarks.routing.engines", f"--engines={share}", f"--first={first}")
        command += [f"--step-s={arguments.step_s}", f"--streams={num_streams}"]
        hosts.append(stack.enter_context(Child(command)))
    for host in hosts:
        ports += host.receive(START_S)["ports"]
    return hosts, ports


async def run_streams(
    load: Load,
    frontend: ServiceProcess,
    hosts: Sequence[Child],
    arguments: argparse.Namespace,
    began_at: float,
) -> Costs:
    """Open all streams, and measure while they run."""
    ports = wait_ports(frontend)
    await _wait_connected(ports["admin_port"], load.num_engines)
    connect_s, connected_mb = time.monotonic() - began_at, resident_bytes(frontend.pid) / 1e6
    await asyncio.sleep(_SETTLE_S)
    idle_before = _counters(frontend, hosts)
    await asyncio.sleep(_IDLE_S)
    idle = _counters(frontend, hosts)
    message = _request(load)
    opened = asyncio.Semaphore(0)

    async def stream(call: grpc.aio.UnaryStreamMultiCallable) -> None:
        is_first = True
        async for _ in call(message):
            if is_first:
                opened.release()
                is_first = False

    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['port']}") as channel:
        call = channel.unary_stream(_METHOD)
        tasks = [asyncio.create_task(stream(call)) for _ in range(load.num_streams)]
        try:
            async with asyncio.timeout(START_S):
                for _ in tasks:
                    await opened.acquire()
            await asyncio.sleep(2 * arguments.step_s)  # until every prompt is computed
            before = _counters(frontend, hosts)
            await asyncio.sleep(arguments.measure_s)
            after = _counters(frontend, hosts)
            streaming_mb = resident_bytes(frontend.pid) / 1e6
            if any(task.done() for task in tasks):
                raise RuntimeError(
                    "streams have ended: give them longer steps, or measure for a shorter time"
                )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def spent(who: str) -> float:
        idle_share = (idle[who] - idle_before[who]) / _IDLE_S
        return after[who] - before[who] - idle_share * arguments.measure_s

    return Costs(
        num_batches=int(after["steps"] - before["steps"]),
        num_tokens=int(after["tokens"] - before["tokens"]),
        frontend_cpu_s=spent("frontend"),
        engines_cpu_s=spent("engines"),
        idle_share=(idle["frontend"] - idle_before["frontend"]) / _IDLE_S,
        connect_s=connect_s,
        connected_mb=connected_mb,
        streaming_mb=streaming_mb,
    )


def _request(load: Load) -> bytes:
    """Return the message that opens a stream which does not end while it is measured."""
    request = generation_pb2.StreamGenerateRequest()
    request.generation.token_ids.ids.extend(range(100, 100 + _PROMPT_LEN))
    request.generation.length.max_tokens = _OUTPUT_LEN
    request.generation.length.ignore_eos = True
    if not load.has_messages:
        request.generation.response.min_interval_tokens = _NEVER
    return request.SerializeToString()


async def _wait_connected(admin_port: int, num_engines: int) -> None:
    """Wait until the frontend says that every engine takes requests."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{admin_port}") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        async with asyncio.timeout(START_S):
            while True:
                answer = await stub.ListEngines(admin_pb2.ListEnginesRequest())
                if sum(engine.ready for engine in answer.engines) == num_engines:
                    return
                await asyncio.sleep(POLL_S)


def _counters(frontend: ServiceProcess, hosts: Sequence[Child]) -> dict[str, float]:
    answers = [host.ask({}, START_S) for host in hosts]
    return {
        "steps": sum(answer["steps"] for answer in answers),
        "tokens": sum(answer["tokens"] for answer in answers),
        "engines": sum(answer["cpu_s"] for answer in answers),
        "frontend": cpu_seconds(descendants([frontend.pid])),
    }


def fit(measured: Mapping[Load, Costs]) -> dict[str, float]:
    """Return the least-squares costs: microseconds per batch, token and message, kB per engine and stream."""
    rows = [
        (costs.num_batches, costs.num_tokens, costs.num_tokens * load.has_messages)
        for load, costs in measured.items()
    ]
    spent = [1e6 * costs.frontend_cpu_s for costs in measured.values()]
    # relative errors: a load of few tokens says as much as one of many
    weights = 1 / np.array(spent)
    solved = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    connected = [(load.num_engines, 1.0) for load in measured]
    engine_mb, base_mb = np.linalg.lstsq(
        np.array(connected), np.array([costs.connected_mb for costs in measured.values()]), rcond=None
    )[0]
    grown = sum(costs.streaming_mb - costs.connected_mb for costs in measured.values())
    return {
        "us per batch": float(solved[0]),
        "us per token": float(solved[1]),
        "us per message": float(solved[2]),
        "kB per engine": 1e3 * float(engine_mb),
        "MB of a frontend": float(base_mb),
        "kB per stream": 1e3 * grown / sum(load.num_streams for load in measured),
    }


def plan(arguments: argparse.Namespace, costs: Mapping[str, float]) -> Iterator[Figure]:
    """Say how many frontends the planned streams need, for some numbers of engines that each frontend is joined to."""
    for name, value in costs.items():
        yield Figure(f"a frontend's cost: {name}", name.split()[0], (value,), less_is_better=True)
    steps_per_s = 1e3 / arguments.plan_step_ms
    num_engines = -(-arguments.plan_streams // arguments.plan_rows)
    tokens_per_s = arguments.plan_streams * steps_per_s
    us_per_token = costs["us per token"] + costs["us per message"] / arguments.plan_tokens_per_message
    for joined in (10, 30, 100, 300, num_engines):
        batches_us = joined * steps_per_s * costs["us per batch"]
        left_us = 1e6 * arguments.plan_core_share - batches_us
        title = (
            f"{arguments.plan_streams:,} streams, each frontend joined to {joined} of {num_engines} engines"
        )
        if left_us <= 0:
            yield Figure(f"{title}: frontends", note="the batches alone take more than the core")
            continue
        num_frontends = max(tokens_per_s * us_per_token / left_us, num_engines / joined)
        yield Figure(f"{title}: frontends", "cores", (math.ceil(num_frontends),), less_is_better=True)
        yield Figure(f"{title}: links", "", (math.ceil(num_frontends) * joined,), less_is_better=True)
        per_engine = math.ceil(num_frontends) * joined / num_engines
        yield Figure(f"{title}: links of each engine", "", (per_engine,), less_is_better=True)
        streams = arguments.plan_streams / math.ceil(num_frontends)
        mb = (
            costs["MB of a frontend"]
            + (streams * costs["kB per stream"] + joined * costs["kB per engine"]) / 1e3
        )
        yield Figure(f"{title}: memory of a frontend", "MB", (mb,), less_is_better=True)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument(
        "--loads",
        nargs="+",
        default=["10x100", "100x10", "100x30"],
        metavar="ENGINESxSTREAMS",
        help="engines, and the streams of each (default: %(default)s)",
    )
    parser.add_argument("--step-s", type=float, default=1.0, help="wall time of a step (default: 1)")
    parser.add_argument("--measure-s", type=float, default=20.0, help="for each load (default: 20)")
    parser.add_argument("--plan-streams", type=int, default=1_000_000, help="default: 1,000,000")
    parser.add_argument("--plan-rows", type=int, default=1000, help="streams of one engine (default: 1,000)")
    parser.add_argument("--plan-step-ms", type=float, default=30.0, help="default: 30")
    parser.add_argument(
        "--plan-tokens-per-message", type=float, default=4, help="that a client gets together (default: 4)"
    )
    parser.add_argument(
        "--plan-core-share", type=float, default=0.7, help="of a frontend's core in use (default: 0.7)"
    )
    sys.exit(run(parser, measure))
