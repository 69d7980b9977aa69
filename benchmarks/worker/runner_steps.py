"""Measures the worker's runner, called in process: a step without scheduler, gRPC and clients.

    python -m benchmarks.worker.runner_steps [--model.quantization q4] [any other option of the config]

All prompts enter in steps of at most `scheduler.max_num_batched_tokens` tokens, then every stream decodes. The
last figure is one prompt of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.session import RunnerSession, checked
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.types.step import StepResult
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

PREFILL_LEN = 1024
PHASES = ("prepare", "forward", "sample")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    runner = load_runner(config_from_arguments(arguments), lambda phase, progress: None)
    for seed in range(arguments.rounds):
        for num_streams in arguments.streams:
            yield from measure_batch(runner, num_streams, arguments.input_len, arguments.output_len, seed)
        prefill_s = enter(runner, RunnerSession(runner), 1, PREFILL_LEN, 1, seed)
        yield Figure(f"prefill of {PREFILL_LEN:,}", "tok/s", (PREFILL_LEN / prefill_s,))


def measure_batch(
    runner: Runner, num_streams: int, input_len: int, output_len: int, seed: int
) -> Iterator[Figure]:
    """Yield the figures of one batch from its first prefill to its last token."""
    session = RunnerSession(runner)
    prefill_s = enter(runner, session, num_streams, input_len, output_len, seed)
    results: list[StepResult] = []
    steps_s = [
        wall_s(lambda: results.append(checked(session.launch().wait()))) for _ in range(output_len - 1)
    ]
    title, decode_s = f"{num_streams} streams", sum(steps_s)
    tokens_per_s = num_streams * output_len / (prefill_s + decode_s)
    yield Figure(f"{title}, tokens of the whole batch", "tok/s", (tokens_per_s,))
    yield Figure(f"{title}, decode", "tok/s", (num_streams * len(steps_s) / decode_s,))
    yield Figure(f"{title}, prefill", "tok/s", (num_streams * input_len / prefill_s,))
    yield Figure(f"{title}, decode step", "ms", (1e3 * statistics.median(steps_s),))
    for phase in PHASES:
        phase_us = statistics.median(getattr(result.timings, f"{phase}_ns") for result in results) / 1e3
        yield Figure(f"{title}, {phase}", "us", (phase_us,))


def enter(
    runner: Runner, session: RunnerSession, num_streams: int, input_len: int, output_len: int, seed: int
) -> float:
    """Compute the prompts of a new session and return the seconds that it takes."""
    num_blocks = -(-(input_len + output_len) // runner.facts.kv.block_size)
    rows = [session.row(slot, input_len, num_blocks=num_blocks, seed=seed) for slot in range(num_streams)]
    session.restart()
    return wall_s(lambda: session.prefill(rows))


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
