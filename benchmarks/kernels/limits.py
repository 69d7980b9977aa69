"""Measures what this machine can do at most: reading memory, and multiplying in registers."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness.command import create_parser
from benchmarks.harness.figures import Figure, rate
from triptych_kernels.cpu.build import ISA_FLAGS, SOURCES
from triptych_kernels.cpu.library import isa, use_threads

UNCACHED_BYTES = 160 << 20
"""Bytes of operands that are read in turn: five times the last cache of a large desktop CPU."""
_SOURCE = Path(__file__).with_suffix(".cpp")


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
    """Prepare, then compile and run the loops, which takes some seconds.

    Raises:
        subprocess.CalledProcessError: The compiler refuses.
    """
    prepare(num_threads)
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "limits.so")
        flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", f"-I{SOURCES}", *ISA_FLAGS[isa()]]
        subprocess.run(["g++", *flags, str(_SOURCE), "-o", str(path)], check=True, capture_output=True)
        library = ctypes.CDLL(str(path))
    limits = (ctypes.c_double * 3)()
    library.measure_limits(num_threads, limits)
    memory, float32, bfloat16 = limits
    return Limits(memory, float32, bfloat16 or float32)
