"""Measures the step journal's cost to the engine core: a decode step with and without it, and the bytes it writes.

Both engines get the same results in turn, step by step, so that a busy machine slows both alike. Figures are CPU
time of the thread for one turn of the loop: expire, plan and apply. The codec of the worker's stream, which both
need, is left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.engine.requests import (
    BLOCK_SIZE,
    NUM_WARM_UP_STEPS,
    PROMPT_LEN,
    VOCAB_SIZE,
    blocks_of,
    decoding_submits,
    worker_facts,
)
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure, distribution
from benchmarks.harness.timing import cpu_s
from services.enginecore.engine import EngineCore
from services.enginecore.journal.recorder import create_engine
from triptych.config import EngineConfig, JournalConfig, SchedulerConfig
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult

SESSION = 1


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            times, num_bytes = step_times(arguments.running, NUM_WARM_UP_STEPS + arguments.steps, directory)
        for name, column in zip(("without journal", "with journal"), times, strict=True):
            yield from distribution(f"{arguments.running} running, {name}", "us", 1e6 * column)
        yield Figure("journal per step, prompts included", "bytes", (num_bytes,))


def step_times(num_running: int, num_steps: int, directory: str) -> tuple[np.ndarray, float]:
    """Return CPU seconds without and with a journal, [2, num_steps], and the bytes of a step in it."""
    off = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=num_running * (PROMPT_LEN + BLOCK_SIZE)
        )
    )
    on = replace(off, journal=JournalConfig(path=directory, max_bytes=1 << 40))
    engines = [start(config, num_running, num_steps) for config in (off, on)]
    shape = (num_steps, num_running)
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, shape, dtype=np.uint32)
    times = np.zeros((2, num_steps))

    def turn(engine: EngineCore, step: int) -> None:
        engine.expire()
        plan = engine.plan()
        assert plan is not None, "nothing to compute"
        engine.apply(StepResult(step + 1, tokens[step]))

    gc.collect()
    gc.freeze()
    for step in range(num_steps):
        for which in (0, 1) if step % 2 else (1, 0):
            times[which, step] = cpu_s(lambda: turn(engines[which], step))  # noqa: B023 # called at once
            engines[which].take_outputs()
    gc.unfreeze()
    for engine in engines:
        engine.close()
    (journal,) = Path(directory).glob("*.journal")
    return times[:, NUM_WARM_UP_STEPS:], journal.stat().st_size / num_steps


def start(config: EngineConfig, num_running: int, num_steps: int) -> EngineCore:
    """Return an engine that has planned one step; its requests outlast all steps."""
    max_model_len = PROMPT_LEN + BLOCK_SIZE + num_steps + 8
    engine = create_engine(config, epoch=time.time_ns() // 1_000_000)
    engine.open_session(SESSION)
    facts = worker_facts(
        num_blocks=blocks_of(num_running, max_model_len),
        max_model_len=max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    engine.worker_ready(facts, after_crash=False)
    for submit in decoding_submits(num_running, SamplingParams(max_tokens=num_steps + 4, ignore_eos=True)):
        engine.submit(SESSION, submit)
    engine.plan()
    return engine


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a round")
    parser.add_argument("--directory", type=Path, help="where the journals are (default: a temporary one)")
    sys.exit(run(parser, measure))
