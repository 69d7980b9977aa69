"""Measures a decode step of the engine core, without a worker and a network: schedule, update and codec.

All requests decode, at uniform phases of their blocks, so that a block_size-th of them crosses into a new block
and fills one in each step. Figures are microseconds of CPU time of the thread, block crossings included.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from benchmarks.engine.requests import (
    BLOCK_SIZE,
    NUM_WARM_UP_STEPS,
    PROMPT_LEN,
    VOCAB_SIZE,
    blocks_of,
    create_scheduler,
    decoding_submits,
)
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure, distribution
from triptych.internal.v1 import step_pb2
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult
from triptych.wire.result import result_from_proto, result_to_proto
from triptych.wire.step import plan_to_proto

STAGES = ("schedule", "encode", "decode", "update")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        for num_running in arguments.running:
            yield from _measure_round(num_running, arguments)


def _measure_round(num_running: int, arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure one full group, then others beside it, and compare the two: a busy machine slows both alike."""
    medians = []
    for num_windows in (0, arguments.windows) if arguments.windows else (0,):
        times = stage_times(num_running, arguments.steps, arguments.steps_in_flight, num_windows) / 1e3
        name = f"{num_running:,} running" + (f" with {num_windows} windows" if num_windows else "")
        for stage, column in zip(STAGES, times, strict=True):
            yield from distribution(f"{name}, {stage}", "us", column)
        yield from distribution(f"{name}, all", "us", times.sum(axis=0))
        planned = times[STAGES.index("schedule")] + times[STAGES.index("update")]
        medians.append((float(np.median(planned)), float(np.median(times.sum(axis=0)))))
    if len(medians) > 1:
        (planned_before, before), (planned, after) = medians
        yield Figure(f"{name} to one group, schedule and update", "", (planned / planned_before,))
        yield Figure(f"{name} to one group, all", "", (after / before,))


def stage_times(num_running: int, num_steps: int, steps_in_flight: int, num_windows: int = 0) -> np.ndarray:
    """Return the nanoseconds of each stage of each step, [num_stages, num_steps]."""
    num_all_steps = NUM_WARM_UP_STEPS + num_steps
    max_model_len = PROMPT_LEN + BLOCK_SIZE + num_all_steps + 8
    scheduler = create_scheduler(
        decoding_submits(num_running, SamplingParams(max_tokens=None)),
        num_blocks=blocks_of(num_running, max_model_len) * (1 + num_windows),
        num_windows=num_windows,
        max_model_len=max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * (PROMPT_LEN + BLOCK_SIZE),
    )
    shape = (num_all_steps, num_running)
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, shape, dtype=np.uint32)
    times = np.zeros((len(STAGES), num_all_steps), np.int64)
    in_flight: deque[int] = deque()
    for _ in range(steps_in_flight - 1):
        plan = scheduler.schedule()
        assert plan is not None
        in_flight.append(plan.step_id)
    gc.collect()
    gc.freeze()
    for step in range(num_all_steps):
        started = time.thread_time_ns()
        plan = scheduler.schedule()
        scheduled = time.thread_time_ns()
        assert plan is not None, "nothing to compute"
        plan_to_proto(plan).SerializeToString()
        encoded = time.thread_time_ns()
        in_flight.append(plan.step_id)
        message = result_to_proto(StepResult(in_flight.popleft(), tokens[step])).SerializeToString()
        received = time.thread_time_ns()
        result = result_from_proto(step_pb2.Result.FromString(message))
        decoded = time.thread_time_ns()
        output = scheduler.update(result)
        updated = time.thread_time_ns()
        assert len(output.token_ids) == num_running, "a request does not decode in this step"
        times[:, step] = scheduled - started, encoded - scheduled, decoded - received, updated - decoded
    gc.unfreeze()
    return times[:, NUM_WARM_UP_STEPS:]


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024], help="requests that decode")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a round")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument(
        "--windows", type=int, default=0, help="groups of layers with a window beside the full one"
    )
    sys.exit(run(parser, measure))
