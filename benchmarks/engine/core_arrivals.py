"""Measures what arrivals cost the engine core: submit received to plan encoded, and the prefix cache's part of it.

All prompts differ and nothing is cached: every block is looked up in vain, hashed and registered. The wire's
encoding is in the first figure, gRPC itself is not. Wall time.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.engine.requests import BLOCK_SIZE, submit_of, worker_facts
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.config import EngineConfig
from triptych.internal.v1 import engine_core_pb2, worker_pb2
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest
from triptych.wire.engine_core import submit_from_proto, submit_to_proto
from triptych.wire.step import plan_to_proto
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.manager import BlockManager

BUDGET = 32_768
NUM_BLOCKS = 10_000
SESSION = 1


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    count, length = arguments.arrivals, arguments.prompt_len
    title = f"{count} prompts of {length} tokens"
    for round_number in range(arguments.rounds):
        submits = [
            submit_of(round_number * count + number, length, SamplingParams(max_tokens=128))
            for number in range(count)
        ]
        yield Figure(f"{title}, submit received to plan encoded", "ms", (1e3 * arrivals_s(submits),))
        per_token_s = (prefix_s(submits, caching=True) - prefix_s(submits, caching=False)) / (count * length)
        yield Figure(f"{title}, prefix cache per 1,000 prompt tokens", "us", (1e9 * per_token_s,))


def arrivals_s(submits: list[SubmitRequest]) -> float:
    """Return the seconds from a SubmitBatch as it comes from the wire to the plan as it leaves."""
    config = EngineConfig()
    limits: dict[str, Any] = {"max_num_seqs": len(submits), "max_num_batched_tokens": BUDGET}
    engine = EngineCore(replace(config, scheduler=replace(config.scheduler, **limits)))
    facts = worker_facts(num_blocks=NUM_BLOCKS, max_model_len=8192, **limits)
    engine.worker_ready(facts, after_crash=False)
    engine.frontends.open_session(SESSION)
    received = engine_core_pb2.SubmitBatch(requests=map(submit_to_proto, submits)).SerializeToString()
    started_s = time.perf_counter()
    for message in engine_core_pb2.SubmitBatch.FromString(received).requests:
        engine.frontends.submit(SESSION, submit_from_proto(message))
    plan = engine.plan()
    assert plan is not None
    worker_pb2.ExecuteRequest(step=plan_to_proto(plan)).SerializeToString()
    elapsed_s = time.perf_counter() - started_s
    assert len(plan.new_rows) == len(submits), f"{len(plan.new_rows)} of {len(submits)} fit into one step"
    return elapsed_s


def prefix_s(submits: list[SubmitRequest], *, caching: bool) -> float:
    """Return the seconds to look up, allocate and register the blocks of all prompts."""
    prompts = [array("I", submit.prompt_token_ids.tobytes()) for submit in submits]
    blocks = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    started_s = time.perf_counter()
    for prompt in prompts:
        table = BlockTable()
        hits = blocks.get_computed_blocks(table, prompt) if caching else []
        blocks.allocate(table, len(prompt), hits)
        blocks.cache_full_blocks([(table, prompt, len(prompt))])
    return time.perf_counter() - started_s


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=21)
    parser.add_argument("--arrivals", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=512)
    sys.exit(run(parser, measure))
