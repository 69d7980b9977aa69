"""What a decode step costs the engine core, with no worker and no network: schedule, update and codec.

    python benchmarks/core_step.py [--running 256 1024] [--steps 1000] [--window 2] [--no-prefix-caching]

All requests decode, at uniform phases of their blocks, so that a block_size-th of them cross into a new block
and fill one in each step. The figures are CPU time of the thread, block crossings included.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from services.enginecore.request import Request
from services.enginecore.scheduler import Scheduler
from triptych.config import SchedulerConfig
from triptych.internal.v1 import worker_pb2
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import single_choice
from triptych.wire.worker import plan_to_proto, result_from_proto, result_to_proto

BLOCK_SIZE = 16
PROMPT_LEN = 128
EOS = 2
VOCAB_SIZE = 49152
NUM_WARMUP_STEPS = 64

Times = NDArray[np.int64]


def build(num_running: int, num_steps: int, *, enable_prefix_caching: bool) -> Scheduler:
    """A scheduler with `num_running` requests queued, of BLOCK_SIZE different lengths."""
    max_model_len = PROMPT_LEN + BLOCK_SIZE + NUM_WARMUP_STEPS + num_steps + 8
    scheduler = Scheduler(
        config=SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=num_running * (PROMPT_LEN + BLOCK_SIZE)
        ),
        num_blocks=1 + num_running * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=[EOS],
        enable_prefix_caching=enable_prefix_caching,
        clock=time.monotonic,
    )
    rng = np.random.default_rng(0)
    for number in range(num_running):
        length = PROMPT_LEN + number % BLOCK_SIZE
        submit = single_choice(
            number,
            str(number),
            rng.integers(EOS + 1, VOCAB_SIZE, length, dtype=np.uint32),
            SamplingParams(max_tokens=None),
            seed=number,
        )
        scheduler.add(*Request.choices_of(submit, session=0))
    return scheduler


def measure(
    num_running: int, num_steps: int, steps_in_flight: int, *, enable_prefix_caching: bool
) -> dict[str, Times]:
    """[num_steps] ns of thread CPU, by stage."""
    scheduler = build(num_running, num_steps, enable_prefix_caching=enable_prefix_caching)
    num_all_steps = NUM_WARMUP_STEPS + num_steps
    tokens = np.random.default_rng(1).integers(
        EOS + 1, VOCAB_SIZE, (num_all_steps, num_running), dtype=np.uint32
    )
    stages = ("schedule", "encode", "decode", "update")
    times = {stage: np.zeros(num_all_steps, np.int64) for stage in stages}
    in_flight: deque[int] = deque()
    while len(in_flight) < steps_in_flight - 1:
        in_flight.append(_plan(scheduler).step_id)
    gc.collect()
    gc.freeze()
    for step in range(num_all_steps):
        start = time.thread_time_ns()
        plan = _plan(scheduler)
        scheduled = time.thread_time_ns()
        plan_to_proto(plan).SerializeToString()
        encoded = time.thread_time_ns()
        in_flight.append(plan.step_id)
        message = result_to_proto(StepResult(in_flight.popleft(), tokens[step])).SerializeToString()
        received = time.thread_time_ns()
        result = result_from_proto(worker_pb2.Result.FromString(message))
        decoded = time.thread_time_ns()
        output = scheduler.update(result)
        updated = time.thread_time_ns()
        assert len(output.token_ids) == num_running, "not a step in which all decode"
        spans = (scheduled - start, encoded - scheduled, decoded - received, updated - decoded)
        for stage, span in zip(stages, spans, strict=True):
            times[stage][step] = span
    gc.unfreeze()
    return {stage: column[NUM_WARMUP_STEPS:] for stage, column in times.items()}


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None, "nothing to compute"
    return plan


def report(num_running: int, times: dict[str, Times]) -> None:
    """One line per stage, then the sums that matter, in µs."""
    sums = {
        "schedule + update": times["schedule"] + times["update"],
        "all": sum(times.values(), np.zeros_like(times["schedule"])),
    }
    for stage, column in {**times, **sums}.items():
        mean, p50, p99 = column.mean() / 1e3, np.median(column) / 1e3, np.percentile(column, 99) / 1e3
        print(
            f"{num_running:>8} {stage:<18} {mean:>8.1f} {p50:>8.1f} {p99:>8.1f} {mean / num_running:>12.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024], help="requests that decode")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured")
    parser.add_argument("--window", type=int, default=2, help="steps in flight")
    parser.add_argument("--no-prefix-caching", action="store_true", help="hash no blocks")
    arguments = parser.parse_args()
    print(f"{'running':>8} {'stage':<18} {'mean us':>8} {'p50 us':>8} {'p99 us':>8} {'us / request':>12}")
    for num_running in arguments.running:
        caching = not arguments.no_prefix_caching
        report(
            num_running,
            measure(num_running, arguments.steps, arguments.steps_in_flight, enable_prefix_caching=caching),
        )


if __name__ == "__main__":
    main()
