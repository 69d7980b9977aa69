"""What the step journal costs the engine core: a decode step with it and without it, and the bytes it writes.

    python benchmarks/journal_step.py [--running 256] [--steps 2000] [--directory DIR]

Both engines get the same results in turn, step by step, so that a busy machine slows both alike. The figures are
CPU time of the thread for one turn of the loop: expire, plan and apply; the codec of the worker's stream, which
both need, is left out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.enginecore.engine import EngineCore
from services.enginecore.journal.recorder import create_engine
from triptych.config import EngineConfig, JournalConfig, SchedulerConfig
from triptych.types.facts import KvShape, ModelFacts, WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import single_choice

BLOCK_SIZE = 16
PROMPT_LEN = 128
VOCAB_SIZE = 49152
NUM_WARMUP_STEPS = 64
SESSION = 1


def start(config: EngineConfig, num_running: int, num_steps: int) -> EngineCore:
    """An engine in which `num_running` requests are about to decode, of BLOCK_SIZE different lengths."""
    max_model_len = PROMPT_LEN + BLOCK_SIZE + NUM_WARMUP_STEPS + num_steps + 8
    num_blocks = 1 + num_running * -(-max_model_len // BLOCK_SIZE)
    engine = create_engine(config, epoch=time.time_ns() // 1_000_000)
    engine.open_session(SESSION)
    facts = WorkerFacts(
        boot_id="",
        model=ModelFacts("", "", VOCAB_SIZE, max_model_len, (), "float32", "float32", "none"),
        kv=KvShape(num_blocks, BLOCK_SIZE, 1, 1, 1, "float32"),
        max_num_seqs=num_running,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_steps_in_flight=4,
    )
    engine.worker_ready(facts, after_crash=False)
    rng = np.random.default_rng(0)
    for number in range(num_running):
        length = PROMPT_LEN + number % BLOCK_SIZE
        prompt = rng.integers(0, VOCAB_SIZE, length, dtype=np.uint32)
        sampling = SamplingParams(max_tokens=NUM_WARMUP_STEPS + num_steps + 4, ignore_eos=True)
        engine.submit(SESSION, single_choice(number, str(number), prompt, sampling, seed=number))
    _plan(engine)
    return engine


def turn(engine: EngineCore, token_ids: np.ndarray, step_id: int) -> int:
    """One turn with two steps in flight; ns of thread CPU."""
    started = time.thread_time_ns()
    engine.expire()
    _plan(engine)
    engine.apply(StepResult(step_id, token_ids))
    spent = time.thread_time_ns() - started
    engine.take_outputs()
    return spent


def _plan(engine: EngineCore) -> StepPlan:
    plan = engine.plan()
    assert plan is not None, "nothing to compute"
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--steps", type=int, default=2000, help="steps measured")
    parser.add_argument("--directory", type=Path, help="of the journal (default: a temporary one)")
    arguments = parser.parse_args()
    num_running, num_steps = arguments.running, NUM_WARMUP_STEPS + arguments.steps
    scheduler = SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=num_running * (PROMPT_LEN + BLOCK_SIZE)
    )
    off = EngineConfig(scheduler=scheduler)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        on = replace(off, journal=JournalConfig(path=str(directory), max_bytes=1 << 40))
        engines = [start(config, num_running, num_steps) for config in (off, on)]
        tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, (num_steps, num_running), dtype=np.uint32)
        spent = np.zeros((2, num_steps), np.int64)
        gc.collect()
        gc.freeze()
        for step in range(num_steps):
            for which in (0, 1) if step % 2 else (1, 0):
                spent[which, step] = turn(engines[which], tokens[step], step + 1)
        for engine in engines:
            engine.close()
        (journal,) = directory.glob("*.journal")
        num_bytes = journal.stat().st_size
    spent = spent[:, NUM_WARMUP_STEPS:]
    print(f"{'journal':<8} {'mean us':>8} {'p50 us':>8} {'p99 us':>8}")
    for name, column in zip(("off", "on"), spent / 1e3, strict=True):
        print(f"{name:<8} {column.mean():>8.1f} {np.median(column):>8.1f} {np.percentile(column, 99):>8.1f}")
    print(f"{num_bytes / num_steps:,.0f} bytes a step, prompts included")


if __name__ == "__main__":
    main()
