"""Measures what three processes and gRPC cost: whole answers through them, in turn with the runner called in process.

    python -m benchmarks.stack.three_processes [--model.quantization q4] [any other option of the config]

Both compute the same batches with the same config: all prompts at once, greedy, prefill included. The ratio is that of
their tokens per second within a round. CPU seconds and context switches are of one batch: a service that waits has
given its core up, one that is off its core has lost it to another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.cluster import running
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from benchmarks.harness.processes import Answers, Child
from benchmarks.harness.timing import wall_s
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.config import EngineConfig
from triptych.config.loader import add_config_flags, config_from_arguments, to_flags
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_ports
from triptych.types.events import DeltaEvent

WARM_UP_LEN = 4
RUN_TIMEOUT_S = 600.0
_STAGES = ("prepare", "forward", "sample", "idle")
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_arguments(arguments)
    config = with_free_ports(replace(config, log=replace(config.log, level="warning")))
    command = [sys.executable, "-m", "benchmarks.stack.three_processes", "--serve-runner", *to_flags(config)]
    title = f"{arguments.streams} streams"
    with running(config) as cluster, Child(command) as runner, asyncio.Runner() as loop:
        runner.receive(RUN_TIMEOUT_S)
        client = loop.run(connect(cluster))
        for number in range(arguments.rounds + 1):
            output_len = arguments.output_len if number else WARM_UP_LEN
            num_tokens = arguments.streams * output_len
            before = {name: counters(pid) for name, pid in cluster.pids.items()}
            stages_before = worker_totals(cluster)
            client_s = time.process_time()
            batch_s = wall_s(lambda: loop.run(run_batch(client, arguments, output_len, number)))  # noqa: B023
            client_s = time.process_time() - client_s
            stages = worker_totals(cluster) - stages_before
            after = {name: counters(pid) for name, pid in cluster.pids.items()}
            batch = {"streams": arguments.streams, "input_len": arguments.input_len, "output_len": output_len}
            runner_s = runner.ask({**batch, "seed": number}, RUN_TIMEOUT_S)["batch_s"]
            if not number:
                continue
            yield Figure(f"{title}, three processes", "tok/s", (num_tokens / batch_s,))
            yield Figure(f"{title}, runner in process", "tok/s", (num_tokens / runner_s,))
            yield Figure(f"{title}, three processes / runner", "", (runner_s / batch_s,))
            num_steps, *stages_s = stages.tolist()
            for stage, stage_s in zip(_STAGES, stages_s, strict=True):
                yield Figure(f"worker, {stage} per step", "ms", (1e3 * stage_s / num_steps,))
            for name in cluster.pids:
                cpu_s, num_waits, num_preemptions = (after[name] - before[name]).tolist()
                yield Figure(f"{name}, CPU per batch", "s", (cpu_s,))
                yield Figure(f"{name}, waits per batch", "", (num_waits,))
                yield Figure(f"{name}, times off its core per batch", "", (num_preemptions,))
            yield Figure("client, CPU per batch", "s", (client_s,))
        loop.run(client.close())


async def connect(cluster: LocalCluster) -> GenerationClient:
    return GenerationClient(cluster.address)


async def run_batch(
    client: GenerationClient, arguments: argparse.Namespace, output_len: int, seed: int
) -> None:
    """Run all streams to their ends.

    Raises:
        ValueError: Tokens are missing.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, arguments.vocab_size, (arguments.streams, arguments.input_len)).tolist()
    sampling = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, "speculation": False}
    options = RequestOptions(whole_choices=not arguments.streamed)

    async def complete(prompt: list[int]) -> int:
        events = client.generate(prompt, sampling, options)
        return sum([len(event.token_ids) async for event in events if isinstance(event, DeltaEvent)])

    num_tokens = await asyncio.gather(*(complete(prompt) for prompt in prompts))
    if set(num_tokens) != {output_len}:
        raise ValueError(f"the answers have {set(num_tokens)} tokens instead of {output_len}")


def counters(pid: int) -> np.ndarray:
    """Return CPU seconds, waits, and times that a thread was taken off its core, of all threads: float [3]."""
    switches = np.zeros(len(_SWITCHES))
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
            switches += [int(fields[name]) for name in _SWITCHES]
    return np.array([cpu_seconds(descendants([pid])), *switches])


def worker_totals(cluster: LocalCluster) -> np.ndarray:
    """Return the worker's steps so far, and the seconds of each of `_STAGES`: float [1 + num_stages]."""
    url = f"http://127.0.0.1:{cluster.config.worker.metrics_port}/metrics"
    with urllib.request.urlopen(url) as response:
        lines = response.read().decode().splitlines()
    totals = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    stages = [f'triptych_worker_stage_seconds_total{{stage="{stage}"}}' for stage in _STAGES]
    return np.array([float(totals[name]) for name in ("triptych_worker_steps_total", *stages)])


def serve_runner(config: EngineConfig) -> None:
    """Compute batches in this process, one for each JSON line, and answer how many seconds each took."""
    from benchmarks.worker.runner_steps import enter  # loads torch, which the client does without
    from benchmarks.worker.session import RunnerSession, checked
    from triptych_services.worker.service.startup import load_runner

    answers = Answers()
    runner = load_runner(config, lambda phase, progress: None)
    answers.write({"ready": True})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        session, output_len = RunnerSession(runner), request["output_len"]
        batch_s = enter(
            runner, session, request["streams"], request["input_len"], output_len, request["seed"]
        )
        batch_s += sum(wall_s(lambda: checked(session.launch().wait())) for _ in range(output_len - 1))  # noqa: B023
        answers.write({"batch_s": batch_s})


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer (default: 128)")
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the model (default: 49152)")
    parser.add_argument("--streamed", action="store_true", help="stream tokens instead of whole answers")
    parser.add_argument("--serve-runner", action="store_true", help=argparse.SUPPRESS)
    add_config_flags(parser)
    if (known := parser.parse_args()).serve_runner:
        serve_runner(config_from_arguments(known))
    else:
        sys.exit(run(parser, measure))
