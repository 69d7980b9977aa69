"""Attention on this CPU, native beside plain torch, and the fraction of what the machine can do.

python kernels/benchmarks/paged_attention.py [--dtype int8] [--threads 2] [--rounds 10]

Every case runs over as many layers as no cache holds, so keys and values come from memory, as they do in a model. Steps
of single queries are to be compared with the limit of memory, prompts with that of arithmetic; of an int8 cache, which
bfloat16 queries read, with that of bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from limits import Limits, measure_limits
from torch import Tensor

from triptych_kernels.cpu.library import isa, use_threads
from triptych_kernels.cpu.program import Recording, record
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CASES = ((1, 1, 200), (1, 1, 8000), (8, 1, 300), (64, 1, 200), (64, 1, 1000), (1, 1024, 1024), (1, 512, 4096))
"""Rows, and queries and keys of each."""
UNCACHED_BYTES = (
    160 << 20
)  # of keys and values read in turn; five times the last cache of a large desktop CPU
MAX_LAYERS = 1000
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
"""Of the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    query: Tensor
    kv_caches: list[tuple[Tensor, Tensor | None]]
    """By layer, with the scales if there are any."""
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    @property
    def kv_bytes(self) -> int:
        """Of keys and values that a layer reads, and of their scales."""
        cache, scales = self.kv_caches[0]
        vector_bytes = HEAD_DIM * cache.itemsize + (0 if scales is None else scales.itemsize)
        return int(self.seq_lens.sum()) * 2 * NUM_KV_HEADS * vector_bytes

    @property
    def operations(self) -> int:
        """Of a layer: a multiplication and an addition for each score and each weighted value."""
        query_lens = self.query_starts.diff().long()
        seen = query_lens * (self.seq_lens - query_lens) + query_lens * (query_lens + 1) // 2
        return int(seen.sum()) * NUM_HEADS * HEAD_DIM * 4


def build_step(num_rows: int, num_queries: int, num_keys: int, dtype: torch.dtype) -> Step:
    num_blocks = -(-num_keys // BLOCK_SIZE)
    shape = num_rows * num_blocks + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    quantized = dtype in LARGEST_ELEMENT
    first = torch.randn(shape)
    scales = torch.full(shape[:4], 3.0 / LARGEST_ELEMENT[dtype]) if quantized else None
    first = (first if scales is None else first / scales[..., None]).to(dtype)
    num_layers = min(-(-UNCACHED_BYTES // first.nbytes), MAX_LAYERS)
    block_tables = (torch.randperm(num_rows * num_blocks) + 1).view(num_rows, num_blocks).int()
    return Step(
        torch.randn(num_rows * num_queries, NUM_HEADS, HEAD_DIM).to(torch.bfloat16 if quantized else dtype),
        [(first.clone(), None if scales is None else scales.clone()) for _ in range(num_layers)],
        block_tables,
        torch.arange(num_rows + 1, dtype=torch.int32) * num_queries,
        torch.full((num_rows,), num_keys, dtype=torch.int32),
    )


def best_s(call: Callable[[], object], rounds: int) -> float:
    """The fastest of several: what others on the machine take away is not ours to count."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure_native(step: Step, rounds: int) -> float:
    """Seconds per layer; all of them are one recorded program, so no Python is measured."""

    def attend_all(recording: Recording) -> list[Tensor]:
        query = recording.input(step.query, count="tokens")
        block_tables, query_starts, seq_lens = (
            recording.input(tensor, count="rows")
            for tensor in (step.block_tables, step.query_starts, step.seq_lens)
        )
        return [
            paged_attention(
                query, cache, block_tables, query_starts, seq_lens, HEAD_DIM**-0.5, kv_scales=scales
            )
            for cache, scales in step.kv_caches
        ][-1:]

    program = record(attend_all)
    counts = {"tokens": len(step.query), "rows": len(step.seq_lens)}
    return best_s(lambda: program.run(counts), rounds) / len(step.kv_caches)


def measure_torch(step: Step, rounds: int) -> float:
    """Seconds per layer."""
    caches = step.kv_caches[:20]
    query_lens, seq_lens = tuple(step.query_starts.diff().tolist()), tuple(step.seq_lens.tolist())

    def attend_all() -> None:
        for cache, scales in caches:
            paged_attention(
                step.query, cache, step.block_tables, step.query_starts, step.seq_lens, HEAD_DIM**-0.5,
                kv_scales=scales, query_lens_list=query_lens, seq_lens_list=seq_lens, impl="torch",
            )  # fmt: skip

    return best_s(attend_all, rounds) / len(caches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the cache; all of them unless given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    use_threads(arguments.threads)
    torch.manual_seed(0)
    limits: Limits = measure_limits(arguments.threads)
    print(
        f"{isa()}, {arguments.threads} threads, {NUM_HEADS} heads over {NUM_KV_HEADS} of {HEAD_DIM}; limits: memory "
        f"{limits.memory:.1f} GB/s, float32 {limits.float32:.0f}, bfloat16 {limits.bfloat16:.0f} GFLOP/s"
    )
    print(
        f"{'dtype':>9} {'rows':>4} {'queries':>7} {'keys':>5} {'torch us':>9} {'us':>8} {'ratio':>6}", end=" "
    )
    print(f"{'GB/s':>6} {'of limit':>8} {'GFLOP/s':>8} {'of limit':>8}")
    for dtype in (DTYPES[arguments.dtype],) if arguments.dtype else DTYPES.values():
        peak = limits.float32 if dtype == torch.float32 else limits.bfloat16
        for case in CASES:
            step = build_step(*case, dtype)
            plain, native = measure_torch(step, arguments.rounds), measure_native(step, arguments.rounds)
            gigabytes, flops = step.kv_bytes / native / 1e9, step.operations / native / 1e9
            print(
                f"{str(dtype)[6:]:>9} {case[0]:>4} {case[1]:>7} {case[2]:>5} {plain * 1e6:>9.1f} "
                f"{native * 1e6:>8.1f} {plain / native:>6.1f} {gigabytes:>6.1f} {gigabytes / limits.memory:>8.0%} "
                f"{flops:>8.1f} {flops / peak:>8.0%}"
            )


if __name__ == "__main__":
    main()
