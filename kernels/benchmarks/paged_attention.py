"""Decode attention on this CPU: each implementation's time, and the bytes of keys and values that it reads a second.

python kernels/benchmarks/paged_attention.py [--threads 2] [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from triptych_kernels.cpu.library import isa
from triptych_kernels.ops import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CASES = ((1, 200), (8, 300), (48, 224), (64, 1000))
"""Rows and keys of each."""


def measure(num_rows: int, num_keys: int, dtype: torch.dtype, impl: str, rounds: int) -> float:
    """Median seconds of one call."""
    num_blocks = -(-num_keys // BLOCK_SIZE)
    kv_cache = torch.randn(num_rows * num_blocks + 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    block_tables = (torch.randperm(num_rows * num_blocks) + 1).view(num_rows, num_blocks).int()
    seq_lens = tuple(num_keys - row % 7 for row in range(num_rows))
    query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(dtype)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        paged_attention(
            query,
            kv_cache,
            block_tables,
            torch.arange(num_rows + 1, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            HEAD_DIM**-0.5,
            query_lens_list=(1,) * num_rows,
            seq_lens_list=seq_lens,
            impl=impl,
        )
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{'rows':>5} {'keys':>5} {'dtype':>9} {'torch us':>9} {isa() + ' us':>9} {'ratio':>6} {'GB/s':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows, num_keys in CASES:
            plain, native = (
                measure(num_rows, num_keys, dtype, impl, arguments.rounds) for impl in ("torch", "cpu")
            )
            num_bytes = num_rows * num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
            print(
                f"{num_rows:>5} {num_keys:>5} {str(dtype)[6:]:>9} {plain * 1e6:>9.0f} {native * 1e6:>9.0f} "
                f"{plain / native:>6.1f} {num_bytes / native / 1e9:>6.1f}"
            )


if __name__ == "__main__":
    main()
