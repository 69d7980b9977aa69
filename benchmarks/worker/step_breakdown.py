"""Measures where the time of a recorded CPU step goes, and what share of the machine's limits each part reaches.

    python -m benchmarks.worker.step_breakdown [--instruction-set avx2] [--threads 1] [any other option of the config]

For a prefill of 1,024 tokens, and for steps of 1, 8, 32 and 64 rows, with q4 weights and with none: the step as it is
served (one native call), then call by call. Each group of calls is beside the least time that its products and the
weights, or keys and values, that it reads take at the rates that are measured first. `Python` is the rest of a step,
its preparation and what happens with its result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.recorded_calls import GROUPS, OTHER, CallTimes, Step, Work, call_by_call
from benchmarks.worker.session import RunnerSession, checked
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych_kernels.cpu.library import isa, threads_in_use
from triptych_kernels.cpu.machine import MachineRates, Rates
from triptych_kernels.cpu.rate_measurement import measure_rates
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

PYTHON = "Python"
_PRODUCTS = ("float32", "bfloat16", "int16", "int8")

RunStep = Callable[[], None]


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_arguments(arguments)
    worker = replace(
        config.worker,
        device="cpu",
        instruction_set=arguments.instruction_set,
        num_threads=arguments.threads,
    )
    rates: MachineRates | None = None
    for quantization in arguments.quantization:
        model = replace(config.model, quantization=quantization)
        runner = load_runner(replace(config, model=model, worker=worker), lambda phase, progress: None)
        if rates is None:
            rates = measure_rates(threads_in_use())
            yield from limits(rates)
        for _ in range(arguments.rounds):
            for length in arguments.prefill:
                title = f"{quantization}, prefill of {length:,}"
                yield from measure_prefill(runner, title, rates.all_threads, length)
            for num_rows in arguments.rows:
                title = f"{quantization}, {num_rows} row{'s' * (num_rows > 1)}"
                yield from measure_decode(
                    runner, title, rates.all_threads, num_rows, arguments.context, arguments.steps
                )


def limits(rates: MachineRates) -> Iterator[Figure]:
    """Yield the rates of all threads together, beside which figures are shown."""
    together, note = rates.all_threads, f"disturbed: {rates.disturbance}" if rates.disturbance else ""
    where = f"limit of {isa()}, {rates.num_threads} thread{'s' * (rates.num_threads > 1)}"
    for product in _PRODUCTS:
        if value := _usable(together, product):
            yield Figure(f"{where}: {product}", "GOP/s", (value,), note=note)
    yield Figure(f"{where}: memory", "GB/s", (together.memory,), note=note)


def measure_prefill(runner: Runner, title: str, rates: Rates, length: int) -> Iterator[Figure]:
    """Yield the figures of one prompt, computed twice as one call and twice call by call; the faster ones count."""
    num_blocks = -(-length // runner.facts.kv.block_size) + 1
    session = RunnerSession(runner)

    def enter() -> None:
        session.restart()
        session.prefill([session.row(0, length, num_blocks=num_blocks)])

    step = Step(keys=length, pairs=length * (length + 1) // 2)
    yield from _breakdown(runner, title, rates, step, enter, num_steps=2)


def measure_decode(
    runner: Runner, title: str, rates: Rates, num_rows: int, context: int, num_steps: int
) -> Iterator[Figure]:
    """Yield the figures of steps in which so many rows of about `context` tokens decode one token each."""
    session = RunnerSession(runner)
    session.restart()
    num_blocks = -(-(context + 2 * num_steps + 1) // runner.facts.kv.block_size)
    session.prefill([session.row(slot, context, num_blocks=num_blocks) for slot in range(num_rows)])
    keys = num_rows * (context + num_steps)  # in the middle of what is measured

    def decode() -> None:
        checked(session.launch().wait())

    yield from _breakdown(runner, title, rates, Step(keys, keys), decode, num_steps=num_steps)


def _breakdown(
    runner: Runner, title: str, rates: Rates, step: Step, run_step: RunStep, *, num_steps: int
) -> Iterator[Figure]:
    whole_s = statistics.median_low(wall_s(run_step) for _ in range(num_steps))
    steps = [_run_call_by_call(run_step) for _ in range(num_steps)]
    # the median step by its sum: parts of different steps would not add up to one
    times, parts_s = sorted(steps, key=lambda each: each[1])[(num_steps - 1) // 2]
    yield Figure(
        f"{title}: step", "ms", (1e3 * whole_s,), note=f"{1e3 * parts_s:.2f} ms in {len(times.calls)} calls"
    )
    seconds: dict[str, float] = defaultdict(float)
    works: dict[str, list[Work]] = defaultdict(list)
    unknown: dict[str, None] = {}
    for call, rows, call_s in times.calls:
        group = call.group(runner.facts.model.vocab_size)
        seconds[group] += call_s
        works[group].append(call.work(group, rows, step))
        if group == OTHER:
            unknown[call.kernel] = None
    seconds[PYTHON] = parts_s - sum(seconds.values())
    for group in (*GROUPS, PYTHON):
        if group in seconds:
            names = f"; unknown: {', '.join(unknown)}" if group == OTHER else ""
            yield _figure(f"{title}: {group}", seconds[group], parts_s, works.get(group, []), rates, names)


def _run_call_by_call(run_step: RunStep) -> tuple[CallTimes, float]:
    """Return the times of a step's calls, and those of the step without what measuring them takes.

    Raises:
        ValueError: The model is not a recorded program.
    """
    times = CallTimes()
    with call_by_call(times):
        step_s = wall_s(run_step)
    if not times.calls:
        raise ValueError("the model's steps are no recorded program: there are no calls to look at")
    measuring_s = times.total_s - sum(call_s for _, _, call_s in times.calls)
    return times, step_s - measuring_s


def _figure(name: str, seconds: float, step_s: float, works: list[Work], rates: Rates, more: str) -> Figure:
    operations, num_bytes = sum(work.operations for work in works), sum(work.num_bytes for work in works)
    usable = replace(rates, bfloat16=_usable(rates, "bfloat16"))
    limit_s = sum(work.limit_s(usable) for work in works)
    notes = [f"{seconds / step_s:.1%} of the step"]
    if operations:
        kinds = ", ".join(dict.fromkeys(work.product for work in works if work.product))
        notes += [
            f"{operations / seconds / 1e9:.0f} GOP/s of {kinds}",
            f"{num_bytes / seconds / 1e9:.1f} GB/s",
        ]
    return Figure(
        name,
        "ms",
        (1e3 * seconds,),
        1e3 * limit_s if limit_s else None,
        less_is_better=True,
        note=", ".join(notes) + more,
    )


def _usable(rates: Rates, product: str) -> float:
    """Return the rate of a product in the unit that multiplies it fastest."""
    found: Mapping[str, float] = {
        "bfloat16": rates.tile_bfloat16 or rates.bfloat16 or rates.float32,
    }
    return found.get(product, getattr(rates, product))


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--quantization", nargs="+", default=["q4", "none"], help="(default: both)")
    parser.add_argument("--instruction-set", default="auto", help="as worker.instruction_set")
    parser.add_argument("--threads", type=int, default=0, help="as worker.num_threads")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="tokens of the prompts")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=190, help="tokens before the first step of a row")
    parser.add_argument("--steps", type=int, default=12, help="of each kind, as one call and call by call")
    add_config_flags(parser)
    sys.exit(run(parser, measure))
