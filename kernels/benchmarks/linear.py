"""Native products on this CPU, by form of the weight and number of rows, beside what the machine can do.

python kernels/benchmarks/linear.py [--threads 2] [--in-features 1536] [--out-features 1536] [--rounds 20]

Weights are read from memory: as many of them are multiplied in turn as no cache holds. Quantized ones are shown beside
the limit of bfloat16; `wide`: multiplied in bfloat16 themselves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from limits import measure_limits
from torch import Tensor

from triptych_kernels.cpu.library import isa, use_threads
from triptych_kernels.cpu.program import Recording, record
from triptych_kernels.ops import linear
from triptych_kernels.weights.formats import BLOCK_FORMATS, QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight

FORMS: dict[str, torch.dtype | QuantizedFormat] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "Q8_0": BLOCK_FORMATS["Q8_0"],
    "Q4_0": BLOCK_FORMATS["Q4_0"],
    "Q4_1": BLOCK_FORMATS["Q4_1"],
}
ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 1024)
WIDE_FROM = 32
UNCACHED_BYTES = 160 << 20  # of weights read in turn; five times the last cache of a large desktop CPU


def best_s(call: Callable[[], object], rounds: int) -> float:
    """The fastest of several: what others on the machine take away is not ours to count."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def create_weight(form: torch.dtype | QuantizedFormat, out_features: int, in_features: int) -> PackedWeight:
    if isinstance(form, torch.dtype):
        return PackedWeight(out_features, in_features, form)
    return QuantizedWeight(out_features, in_features, torch.bfloat16, form)


def measure(weights: list[PackedWeight], num_rows: int, *, wide: bool, rounds: int) -> float:
    """Seconds per product; all of them are one recorded program, so no Python is measured."""
    weights = weights[: max(1, 512 // num_rows)]  # many rows read little and take long
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            weight.wide_rows = 1 if wide else NEVER
    x = torch.randn(num_rows, weights[0].in_features).to(weights[0].dtype)

    def multiply_all(recording: Recording) -> list[Tensor]:
        stand_in = recording.input(x, count="rows")
        return [linear(stand_in, weight) for weight in weights][-1:]

    program = record(multiply_all)
    return best_s(lambda: program.run({"rows": num_rows}), rounds) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--in-features", type=int, default=1536)
    parser.add_argument("--out-features", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    use_threads(arguments.threads)
    torch.manual_seed(0)
    shape = (arguments.out_features, arguments.in_features)
    limits = measure_limits(arguments.threads)
    peaks = {torch.float32: limits.float32, torch.bfloat16: limits.bfloat16}
    print(f"{isa()}, {arguments.threads} threads, {shape[1]} inputs, {shape[0]} outputs")
    print(f"limits: {limits.memory:.1f} GB/s; {limits.float32:.0f} GFLOP/s, bfloat16 {limits.bfloat16:.0f}")
    print(f"{'weight':>9} {'rows':>5} {'us':>9} {'GB/s':>6} {'of limit':>8} {'GFLOP/s':>8} {'of limit':>8}")
    for name, form in FORMS.items():
        num_bytes = create_weight(form, *shape).num_bytes
        weights = [create_weight(form, *shape) for _ in range(-(-UNCACHED_BYTES // num_bytes))]
        for num_rows in ROWS:
            is_quantized = isinstance(form, QuantizedFormat)
            for wide in (False, True) if is_quantized and num_rows >= WIDE_FROM else (False,):
                seconds = measure(weights, num_rows, wide=wide, rounds=arguments.rounds)
                gigabytes = num_bytes / seconds / 1e9
                gigaflops = 2 * num_rows * shape[0] * shape[1] / seconds / 1e9
                print(
                    f"{name + ' wide' * wide:>9} {num_rows:>5} {seconds * 1e6:>9.1f} {gigabytes:>6.1f} "
                    f"{gigabytes / limits.memory:>8.0%} {gigaflops:>8.1f} "
                    f"{gigaflops / peaks[weights[0].dtype]:>8.0%}"
                )


if __name__ == "__main__":
    main()
