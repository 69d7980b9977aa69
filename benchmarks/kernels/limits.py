"""The limits of this machine beside which benchmarks of kernels show their rates: reading memory, and products."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness.command import create_parser
from benchmarks.harness.figures import Figure, rate
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.rate_measurement import measure_rates

UNCACHED_BYTES = 160 << 20
"""Bytes of operands that are read in turn: five times the last cache of a large desktop CPU."""


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
    """Prepare, then measure the machine. Needs native kernels."""
    prepare(num_threads)
    rates = measure_rates(num_threads).all_threads
    return Limits(rates.memory, rates.float32, rates.tile_bfloat16 or rates.bfloat16 or rates.float32)
