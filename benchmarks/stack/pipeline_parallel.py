"""Measures a model in stages behind the whole stack, with steps in flight at the same time and without.

    python -m benchmarks.stack.pipeline_parallel [--stages 2] [any option of the config]

Every rank has --threads threads. All streams run at once, greedy, prefill included. A stage is busy while it prepares,
computes or samples; the rest of the time it waits for another stage, or for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.stack.three_processes import connect, run_batch
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_ports

READY_S = 300.0
_METRICS = re.compile(r"worker(?:/(\d+))? .*listening on .* metrics_port=(\d+)")
_BUSY = re.compile(
    r'^triptych_worker_stage_seconds_total{stage="(?:prepare|forward|sample)"} (\S+)$', re.MULTILINE
)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures of one process, and of the stages with one step in flight and with as many as it takes."""
    yield from measure_stack(arguments, "one process", num_stages=1, steps_in_flight=0)
    stages = f"{arguments.stages} stages"
    yield from measure_stack(
        arguments, f"{stages}, one step at a time", num_stages=arguments.stages, steps_in_flight=1
    )
    yield from measure_stack(
        arguments, f"{stages}, steps overlap", num_stages=arguments.stages, steps_in_flight=0
    )


def measure_stack(
    arguments: argparse.Namespace, title: str, *, num_stages: int, steps_in_flight: int
) -> Iterator[Figure]:
    config = with_free_ports(config_from_arguments(arguments))
    config = replace(
        config,
        worker=replace(config.worker, num_threads=arguments.threads),
        scheduler=replace(config.scheduler, steps_in_flight=steps_in_flight),
        parallel=replace(config.parallel, pipeline_parallel_size=num_stages),
    )
    rank_to_port: dict[int, int] = {}

    def note(line: str) -> None:
        if (found := _METRICS.search(line)) is not None:
            rank_to_port[int(found[1] or 0)] = int(found[2])

    num_tokens = arguments.streams * arguments.output_len
    with LocalCluster(config, on_log_line=note) as cluster, asyncio.Runner() as loop:
        cluster.wait_ready(READY_S)
        client = loop.run(connect(cluster))
        for number in range(arguments.rounds + 1):
            before, started = busy_seconds(rank_to_port), time.perf_counter()
            loop.run(run_batch(client, arguments, arguments.output_len, number))
            seconds = time.perf_counter() - started
            if not number:
                continue
            yield Figure(f"{title}: output", "tok/s", (num_tokens / seconds,))
            for rank, busy_s in busy_seconds(rank_to_port).items():
                yield Figure(f"{title}: stage {rank} busy", "%", (100 * (busy_s - before[rank]) / seconds,))
        loop.run(client.close())


def busy_seconds(rank_to_port: dict[int, int]) -> dict[int, float]:
    """Return the seconds for which each rank has been busy so far, by rank."""
    rank_to_seconds = {}
    for rank, port in sorted(rank_to_port.items()):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            rank_to_seconds[rank] = sum(map(float, _BUSY.findall(response.read().decode())))
    return rank_to_seconds


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank (default: 1)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64, help="tokens of each prompt (default: 64)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the model (default: 49152)")
    parser.set_defaults(streamed=False)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
