"""What this machine can do at most, measured on the spot: reading memory, and multiplying in registers."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import torch

from triptych_kernels.cpu.build import ISA_FLAGS, SOURCES
from triptych_kernels.cpu.library import isa

_SOURCE = Path(__file__).with_suffix(".cpp")
_READ_BYTES = 128 << 20  # per thread: more than caches hold
_TURNS = 1_000_000  # some milliseconds
_ROUNDS = 12  # the fastest counts


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all threads together."""

    memory: float
    """GB/s, reading."""
    float32: float
    """GFLOP/s"""
    bfloat16: float
    """GFLOP/s; without an instruction for it, that of float32."""


def measure_limits(num_threads: int) -> Limits:
    """Compile and run the loops, which takes some seconds.

    Raises:
        subprocess.CalledProcessError: the compiler refuses.
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
    """The shortest time in which all threads carry out call(thread) at once; it lets go of Python's lock."""
    barrier = Barrier(num_threads)

    def run(thread: int) -> tuple[float, float]:
        barrier.wait()
        started = time.perf_counter()
        call(thread)
        return started, time.perf_counter()

    rounds = []
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_ROUNDS):
            spans = list(threads.map(run, range(num_threads)))
            rounds.append(max(end for _, end in spans) - min(start for start, _ in spans))
    return min(rounds)
