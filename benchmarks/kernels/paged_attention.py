"""Measures native attention on this CPU, and the fraction of what the machine can do.

Every case runs over as many layers as no cache holds, so keys and values come from memory, as they do in a model. Steps
of single queries are to be compared with the limit of memory, prompts with that of arithmetic; of an int8 cache, which
bfloat16 queries read, with that of bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness.command import run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import samples_s
from benchmarks.kernels.attention_step import AttentionStep, Heads, build_step
from benchmarks.kernels.limits import UNCACHED_BYTES, create_kernel_parser, measure_limits
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import Recording

HEADS = Heads(num_heads=9, num_kv_heads=3, head_dim=64)
CASES = ((1, 1, 200), (1, 1, 8000), (8, 1, 300), (64, 1, 200), (64, 1, 1000), (1, 1024, 1024), (1, 512, 4096))
"""Rows, and queries and keys of each."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
"""Element types of the cache."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    limits = measure_limits(arguments.threads)
    for name in [arguments.dtype] if arguments.dtype else DTYPES:
        for case in CASES:
            step = build_step(HEADS, *case, DTYPES[name], torch.device("cpu"), uncached_bytes=UNCACHED_BYTES)
            rows, queries, keys = case
            title = f"{name}, {rows} rows of {queries} queries and {keys} keys"
            yield from limits.rates(
                title,
                layer_s(step, arguments.rounds),
                num_bytes=step.kv_bytes,
                operations=step.operations,
                dtype=torch.float32 if name == "float32" else torch.bfloat16,
            )


def layer_s(step: AttentionStep, num_rounds: int) -> list[float]:
    """Return the seconds of one layer; all of them are one recorded program, so no Python is measured."""

    packed_query = step.query.contiguous()

    def attend_all(recording: Recording) -> list[Tensor]:
        recorded = replace(
            step,
            query=recording.input(packed_query, count="tokens"),
            block_tables=recording.input(step.block_tables, count="rows"),
            query_starts=recording.input(step.query_starts, count="rows"),
            seq_lens=recording.input(step.seq_lens, count="rows"),
        )
        return [recorded.attend(layer) for layer in range(len(step.kv_caches))][-1:]

    program = record(attend_all)
    counts = {"tokens": len(step.query), "rows": len(step.seq_lens)}
    all_s = samples_s(lambda: program.run(counts), num_rounds)
    return [sample_s / len(step.kv_caches) for sample_s in all_s]


if __name__ == "__main__":
    parser = create_kernel_parser(__doc__, rounds=10)
    parser.add_argument("--dtype", choices=DTYPES, help="of the cache; default: all")
    sys.exit(run(parser, measure))
