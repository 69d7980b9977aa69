"""Measures what this machine can do at most: reading memory, and multiplying in registers."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import torch

from benchmarks.harness.command import create_parser
from benchmarks.harness.figures import Figure, rate
from triptych_kernels.cpu.build import ISA_FLAGS, SOURCES
from triptych_kernels.cpu.library import isa, use_threads

UNCACHED_BYTES = 160 << 20
"""Bytes of operands that are read in turn: five times the last cache of a large desktop CPU."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_READ_BYTES = 128 << 20  # per thread: more than caches hold
_TURNS = 1_000_000  # some milliseconds
_ROUNDS = 12  # the fastest counts


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all threads together."""

    memory: float
    """GB/s, reading."""
    float32: float
    """GFLOP/s"""
    bfloat16: float
    """GFLOP/s; without an instruction for it, that of float32."""

    def rates(
        self, name: str, seconds: Sequence[float], *, num_bytes: float, operations: float, dtype: torch.dtype
    ) -> tuple[Figure, Figure]:
        """Return both rates of one computation, each beside the limit that bounds it."""
        note = f"{1e6 * statistics.median(seconds):.1f} us"
        arithmetic = self.float32 if dtype == torch.float32 else self.bfloat16
        return (
            rate(f"{name}, read", "GB/s", num_bytes / 1e9, seconds, self.memory, note),
            rate(f"{name}, computed", "GFLOP/s", operations / 1e9, seconds, arithmetic, note),
        )


def create_kernel_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every kernel's benchmark."""
    parser = create_parser(description, rounds=rounds)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def prepare(num_threads: int) -> None:
    """Let torch and the native kernels compute with this many threads, on the same numbers in every run."""
    torch.set_num_threads(num_threads)
    use_threads(num_threads)
    torch.manual_seed(0)


def measure_limits(num_threads: int) -> Limits:
    """Compile and run the loops, which takes some seconds.

    Raises:
        subprocess.CalledProcessError: The compiler refuses.
    """
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "limits.so")
        flags = ["-std=c++20", "-O3", "-fPIC", "-shared", f"-I{SOURCES}", *ISA_FLAGS[isa()]]
        subprocess.run(["g++", *flags, str(_SOURCE), "-o", str(path)], check=True, capture_output=True)
        library = ctypes.CDLL(str(path))
    library.read_floats.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.read_floats.restype = ctypes.c_float
    memory = [torch.ones(_READ_BYTES // 4) for _ in range(num_threads)]
    read_s = _best_s(num_threads, lambda i: library.read_floats(memory[i].data_ptr(), _READ_BYTES // 4))
    float32, bfloat16 = (
        _gigaflops(function, num_threads)
        for function in (library.multiply_float32, library.multiply_bfloat16)
    )
    return Limits(num_threads * _READ_BYTES / read_s / 1e9, float32, bfloat16 or float32)


def _gigaflops(function: ctypes._NamedFuncPointer, num_threads: int) -> float:
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64
    sums = [torch.zeros(16) for _ in range(num_threads)]
    per_turn: int = function(1, sums[0].data_ptr())
    seconds = _best_s(num_threads, lambda i: function(_TURNS, sums[i].data_ptr()))
    return num_threads * per_turn * _TURNS / seconds / 1e9


def _best_s(num_threads: int, call: Callable[[int], object]) -> float:
    """Return the shortest time in which all threads carry out call(thread) at once; it releases Python's lock."""
    barrier = Barrier(num_threads)

    def run(thread: int) -> tuple[float, float]:
        barrier.wait()
        started_s = time.perf_counter()
        call(thread)
        return started_s, time.perf_counter()

    rounds = []
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_ROUNDS):
            spans = list(threads.map(run, range(num_threads)))
            rounds.append(max(end for _, end in spans) - min(start for start, _ in spans))
    return min(rounds)
