"""What an arrival costs the engine core: submit received to plan encoded, and the prefix cache's part of it.

    python benchmarks/core_arrivals.py [--arrivals 64] [--prompt-len 512] [--rounds 21]

All prompts differ and nothing is cached: every block is looked up in vain, hashed and offered. The wire's encoding is
in the first figure, gRPC itself is not. Wall time; medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from dataclasses import replace

import numpy as np

from services.enginecore.engine import EngineCore
from services.enginecore.kv import BlockManager
from services.enginecore.kv.block_table import BlockTable
from triptych.config import EngineConfig
from triptych.internal.v1 import engine_core_pb2, worker_pb2
from triptych.types.facts import KvShape, ModelFacts, WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych.wire.engine_core import submit_from_proto, submit_to_proto
from triptych.wire.worker import plan_to_proto

VOCAB_SIZE = 49152
BLOCK_SIZE = 16
BUDGET = 32_768
NUM_BLOCKS = 10_000
SESSION = 1


def arrivals_ms(num_arrivals: int, prompt_len: int, seed: int) -> float:
    """One round: a SubmitBatch as it comes from the wire, and the plan as it leaves."""
    config = EngineConfig()
    config = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=num_arrivals, max_num_batched_tokens=BUDGET),
    )
    engine = EngineCore(config)
    engine.worker_ready(
        WorkerFacts(
            boot_id="none",
            model=ModelFacts("none", "0" * 64, VOCAB_SIZE, 8192, (), "float32", "float32", "none"),
            kv=KvShape(NUM_BLOCKS, BLOCK_SIZE, 1, 1, 1, "float32"),
            max_num_seqs=num_arrivals,
            max_num_batched_tokens=BUDGET,
            max_steps_in_flight=4,
        ),
        after_crash=False,
    )
    engine.open_session(SESSION)
    rng = np.random.default_rng(seed)
    received = engine_core_pb2.SubmitBatch(
        requests=[
            submit_to_proto(
                single_choice(
                    number,
                    str(number),
                    rng.integers(0, VOCAB_SIZE, prompt_len, dtype=np.uint32),
                    SamplingParams(max_tokens=128),
                    seed=number,
                )
            )
            for number in range(num_arrivals)
        ]
    ).SerializeToString()
    started = time.perf_counter()
    for message in engine_core_pb2.SubmitBatch.FromString(received).requests:
        engine.submit(SESSION, submit_from_proto(message))
    plan = engine.plan()
    assert plan is not None
    sent = worker_pb2.ExecuteRequest(step=plan_to_proto(plan)).SerializeToString()
    elapsed_s = time.perf_counter() - started
    assert len(plan.new_rows) == num_arrivals, f"{len(plan.new_rows)} of {num_arrivals} fit into one step"
    assert sent
    return elapsed_s * 1e3


def prefix_us(num_prompts: int, prompt_len: int, seed: int) -> float:
    """One round: looking up, allocating and offering, with the cache less without it, per 1,000 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [
        array("I", rng.integers(0, VOCAB_SIZE, prompt_len, dtype=np.uint32).tobytes())
        for _ in range(num_prompts)
    ]
    seconds = {}
    for is_caching in (False, True):
        blocks = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=is_caching)
        started = time.perf_counter()
        for prompt in prompts:
            table = BlockTable(extras={})
            hits = blocks.get_computed_blocks(table, prompt) if is_caching else []
            blocks.allocate(table, prompt_len, hits)
            blocks.cache_full_blocks(table, prompt, prompt_len)
        seconds[is_caching] = time.perf_counter() - started
    return (seconds[True] - seconds[False]) * 1e6 / (num_prompts * prompt_len / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arrivals", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    for name, unit, measure in (
        ("submit received to plan encoded", "ms", arrivals_ms),
        ("prefix cache per 1,000 prompt tokens", "us", prefix_us),
    ):
        figures = sorted(
            measure(arguments.arrivals, arguments.prompt_len, seed) for seed in range(arguments.rounds)
        )
        print(
            f"{arguments.arrivals} prompts of {arguments.prompt_len} tokens, {name}: "
            f"{statistics.median(figures):.2f} {unit} ({figures[0]:.2f} to {figures[-1]:.2f}, {len(figures)} rounds)"
        )


if __name__ == "__main__":
    main()
