"""Measures how busy the stages of a simulated pipeline are, with rows divided among the steps in flight and without.

The engine's scheduler is the real one. Time is virtual, so that a figure depends on no machine: a plan and its result
take --round-trip-us between engine and worker, and the scheduler takes none. Every request has --prompt tokens and gets
--tokens. A stage is idle while no step is in it.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator

import numpy as np

from benchmarks.engine.requests import BLOCK_SIZE, VOCAB_SIZE, blocks_of, create_scheduler, submit_of
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.config import SimulationConfig
from triptych.config.step_times import StepTimeModel
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.resolved_config import max_steps_in_flight
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner
from triptych_services.worker.simulation.stages import SimulatedStages, StepInStages

_DEFAULTS = SimulationConfig()  # an 8B model on an accelerator of 3 TB/s
STEP_TIME = StepTimeModel(
    base_ms=_DEFAULTS.base_ms,
    prefill_token_us=_DEFAULTS.prefill_token_us,
    decode_row_us=_DEFAULTS.decode_row_us,
    context_token_ns=_DEFAULTS.context_token_ns,
)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for num_stages in arguments.stages:
        for is_divided in (False, True) if num_stages > 1 else (False,):
            seconds, idle_share = simulate(num_stages, arguments, is_divided=is_divided)
            how = f"{num_stages} stages, rows {'divided' if is_divided else 'together'}"
            yield Figure(f"{how}: output", "tok/s", (arguments.rows * arguments.tokens / seconds,))
            yield Figure(f"{how}: stages idle", "%", (100 * idle_share,), less_is_better=True)


def simulate(num_stages: int, arguments: argparse.Namespace, *, is_divided: bool) -> tuple[float, float]:
    """Return the seconds that all requests take, and the share of them that a stage is idle."""
    num_rows, half_trip_ns, now_ns = arguments.rows, arguments.round_trip_us * 500, 0

    def at_worker() -> int:
        return now_ns + half_trip_ns  # where what is sent now arrives

    def do_not_wait(seconds: float) -> None:
        raise AssertionError("time is virtual")

    max_model_len = arguments.prompt + arguments.tokens + 1
    num_blocks = blocks_of(num_rows, max_model_len)
    runner = SimulatedRunner(
        facts=WorkerFacts(
            boot_id="none",
            model=ModelFacts(
                "none", ModelIdentity("0" * 64), VOCAB_SIZE, max_model_len, (), "bfloat16", "bfloat16", "none"
            ),
            kv=KvLayout(num_blocks, BLOCK_SIZE, 1, 1, 1, "bfloat16"),
            max_num_seqs=num_rows,
            max_num_batched_tokens=2048,
            max_steps_in_flight=max_steps_in_flight(num_stages),
            num_stages=num_stages,
        ),
        device=SimulatedDevice(STEP_TIME, clock=at_worker, sleep=do_not_wait),
        word_ids=np.arange(3, VOCAB_SIZE),
        stages=SimulatedStages(
            STEP_TIME, num_stages=num_stages, max_num_seqs=num_rows, clock=at_worker, sleep=do_not_wait
        ),
    )
    sampling = SamplingParams(max_tokens=arguments.tokens)
    scheduler = create_scheduler(
        [submit_of(number, arguments.prompt, sampling) for number in range(num_rows)],
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=num_rows,
        max_num_batched_tokens=2048,
        num_stages=num_stages if is_divided else 1,
    )
    busy_ns = 0
    in_flight: deque[StepInStages] = deque()
    while scheduler.has_work or in_flight:
        while len(in_flight) <= num_stages and (plan := scheduler.schedule()) is not None:
            step = runner.launch(plan)
            assert isinstance(step, StepInStages), "no step is empty"
            in_flight.append(step)
        step = in_flight.popleft()
        now_ns = max(now_ns, step.done_at_ns + half_trip_ns)
        scheduler.update(step.result)
        busy_ns += step.result.timings.forward_ns
    return now_ns / 1e9, 1 - busy_ns / now_ns


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=256, help="requests that decode")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--round-trip-us", type=int, default=500, help="between engine and worker")
    sys.exit(run(parser, measure))
