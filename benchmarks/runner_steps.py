"""The worker's runner alone, called in process: what a step costs without scheduler, gRPC and clients.

    python benchmarks/runner_steps.py [--streams 1 8 32 64] [--input-len 128] [--output-len 128] [--rounds 3]
        [--model.quantization q4] [any other flag of the config]

All prompts enter in steps of at most `scheduler.max_num_batched_tokens` tokens, then every stream decodes. The
prefill row is one prompt of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from services.worker.runner.base import Runner
from services.worker.service.startup import load_runner
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult, empty_u32

PREFILL_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """One batch from its first prefill to its last token."""

    prefill_s: float
    decode_s: float
    steps: list[float]
    """Seconds of each decode step."""
    timings: dict[str, float]
    """Microseconds per decode step, by phase."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    add_config_flags(parser)
    arguments = parser.parse_args()
    runner = load_runner(config_from_arguments(arguments), lambda phase, progress: None)
    print(
        f"{'streams':>8} {'tok/s':>8} {'decode tok/s':>13} {'step ms':>8} {'prefill tok/s':>14}  us by phase"
    )
    for num_streams in arguments.streams:
        runs = [
            run(runner, num_streams, arguments.input_len, arguments.output_len, seed)
            for seed in range(arguments.rounds)
        ]
        best = statistics.median(
            num_streams * arguments.output_len / (r.prefill_s + r.decode_s) for r in runs
        )
        middle = sorted(runs, key=lambda r: r.decode_s)[len(runs) // 2]
        decoded = num_streams * (arguments.output_len - 1) / middle.decode_s
        prefill = num_streams * arguments.input_len / statistics.median(r.prefill_s for r in runs)
        phases = ", ".join(f"{name} {us:.0f}" for name, us in middle.timings.items())
        step_ms = statistics.median(middle.steps) * 1e3
        print(f"{num_streams:>8} {best:>8.1f} {decoded:>13.1f} {step_ms:>8.2f} {prefill:>14.0f}  {phases}")
    prefills = [run(runner, 1, PREFILL_TOKENS, 1, seed).prefill_s for seed in range(arguments.rounds)]
    print(f"prefill of {PREFILL_TOKENS}: {PREFILL_TOKENS / statistics.median(prefills):.0f} tokens/s")


def run(runner: Runner, num_streams: int, input_len: int, output_len: int, seed: int) -> Run:
    """Prompts of random tokens, never the same twice."""
    facts = runner.facts
    rng = np.random.default_rng(seed)
    blocks_each = -(-(input_len + output_len) // facts.kv.block_size)
    budget = facts.max_num_batched_tokens
    runner.reset()
    step_id, entered, begun = 0, 0, time.perf_counter()
    # whole prompts only: chunks are the scheduler's business
    per_step = max(budget // input_len, 1)
    while entered < num_streams:
        count = min(per_step, num_streams - entered)
        slots = range(entered, entered + count)
        rows = tuple(
            NewRow(
                slot=slot,
                slot_version=0,
                content=RowContent(
                    rng.integers(0, facts.model.vocab_size, input_len, dtype=np.uint32),
                    SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
                ),
                emitted_token_ids=empty_u32(),
                num_computed_tokens=0,
                num_cached_tokens=0,
                block_ids=np.arange(1 + slot * blocks_each, 1 + (slot + 1) * blocks_each, dtype=np.uint32),
                seed=0,
            )
            for slot in slots
        )
        step_id += 1
        runner.execute(
            StepPlan(
                step_id=step_id,
                last_result_seen=step_id - 1,
                new_rows=rows,
                chunk_slots=np.array(slots, np.uint32),
                chunk_lengths=np.full(count, input_len, np.uint32),
                skipped_slots=np.arange(entered, dtype=np.uint32),
            )
        )
        entered += count
    prefill_s = time.perf_counter() - begun
    results: list[StepResult] = []
    steps: list[float] = []
    for _ in range(output_len - 1):
        started = time.perf_counter()
        step_id += 1
        results.append(runner.execute(StepPlan(step_id=step_id, last_result_seen=step_id - 1)))
        steps.append(time.perf_counter() - started)
    timings = {
        name: statistics.median([getattr(r.timings, f"{name}_ns") for r in results] or [0]) / 1e3
        for name in ("prepare", "forward", "sample")
    }
    return Run(prefill_s, sum(steps), steps, timings)


if __name__ == "__main__":
    main()
