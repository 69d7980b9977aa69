"""The native library for this processor, loaded once."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from triptych_kernels.cpu.amx import request_permission
from triptych_kernels.cpu.build import DIGEST, library_path

_CPUINFO = Path("/proc/cpuinfo")
_TIMEOUT_S = 10.0
_NO_MEMORY = 1  # `Failure` in kernel.h
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AMX = {"amx_tile", "amx_bf16"}
_NEEDED_FLAGS = {
    "amx": _AVX512_BF16 | _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute with, as their arguments name it: `DType` in kernel.h."""
KV_DTYPES = DTYPES | {torch.int8: 2}
"""What they read and write in a KV cache."""

_forced: list[str] = []


def isa() -> str:
    """The instruction set that is used: the widest built and understood here; empty: none is, and plain torch
    serves."""
    return _forced[-1] if _forced else _widest()


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Use this one of those that were built, whatever the processor's widest, or none; for tests. What was
    packed outside is not for the inside."""
    _forced.append(isa)
    try:
        yield
    finally:
        _forced.pop()


@cache
def usable_isas() -> tuple[str, ...]:
    """Those built that this processor understands and the system lets us use, widest first."""
    if platform.machine() != "x86_64" or not DIGEST.is_file():
        return ()
    flags = _processor_flags()
    return tuple(
        isa
        for isa, needed in _NEEDED_FLAGS.items()
        if flags >= needed and library_path(isa).is_file() and not (needed & _AMX and amx_refusal())
    )


@cache
def amx_refusal() -> str:
    """Why this process cannot use the AMX that its processor has; empty: it can, or there is none."""
    if not _processor_flags() >= _AMX:
        return ""
    return request_permission()


def _widest() -> str:
    return next(iter(usable_isas()), "")


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library for one of those that were built.

    Raises:
        OSError: it cannot be loaded; `python -m triptych_kernels.cpu.build` makes it anew.
    """
    return ctypes.CDLL(str(library_path(isa)))


def use_threads(count: int) -> None:
    """Compute with this many threads, the caller's own among them. Where there is no library it does nothing.

    A forked child computes with as many, threads of its own.

    Raises:
        RuntimeError: the system does not start so many; the caller's own then computes by itself.
    """
    if isa():
        function = load(isa()).triptych_set_threads
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
        raise_failure(function(count), f"{count} threads")


def raise_failure(failure: int, what: str) -> None:
    """Raise what the library's functions return: `Failure` in kernel.h, 0 for none."""
    if failure == 0:
        return
    if failure == _NO_MEMORY:
        raise MemoryError(f"{what}: the system has no memory for what the native kernels need while they run")
    raise RuntimeError(
        f"{what}: the system starts no further thread; look at `ulimit -u` and at the container's limit of processes"
    )


def _processor_flags() -> set[str]:
    """The instruction sets that the processor names; empty where the system does not say."""
    if sys.platform == "darwin":
        return _flags_of_sysctl()
    if not _CPUINFO.is_file():
        return set()
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _flags_of_sysctl() -> set[str]:
    """Those of a Mac with an Intel processor: macOS writes `AVX2` and `FMA` where Linux writes `avx2` and `fma`."""
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.lower().split())
