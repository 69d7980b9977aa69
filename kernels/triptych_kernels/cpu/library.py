"""The native library for this processor, loaded once."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from triptych_kernels.cpu.build import DIGEST, library_path

CPUINFO = Path("/proc/cpuinfo")
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
"""Dtypes that the kernels compute with -> `DType` in kernel.h."""
KV_DTYPES = DTYPES | {torch.int8: 2}
"""Dtypes of KV caches that the kernels read and write -> `DType`."""

_SYS_ARCH_PRCTL = 158  # on x86-64; the C library has no function for it
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_forced: list[str] = []


def isa() -> str:
    """Return the instruction set in use: the widest that was built and that this machine has.

    It is empty if there is none, and plain torch computes."""
    return _forced[-1] if _forced else _widest()


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Use this one of the built instruction sets, or none if it is empty, inside the context; for tests.

    Weights that were packed outside must not be used inside.
    """
    _forced.append(isa)
    try:
        yield
    finally:
        _forced.pop()


@cache
def usable_isas() -> tuple[str, ...]:
    """Return the built instruction sets that processor and system let us use, widest first."""
    if platform.machine() != "x86_64" or not DIGEST.is_file():
        return ()
    flags = processor_flags()
    return tuple(
        isa
        for isa, needed in _NEEDED_FLAGS.items()
        if flags >= needed and library_path(isa).is_file() and not (needed & _AMX and amx_refusal())
    )


@cache
def amx_refusal() -> str:
    """Return why this process cannot use the processor's AMX; empty if it can, or if the processor has none."""
    if not processor_flags() >= _AMX:
        return ""
    return request_permission()


def request_permission() -> str:
    """Ask Linux to let all threads of this process use AMX, present and future ones.

    Returns:
        The system's reason to refuse, or an empty string if it agrees.
    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def _widest() -> str:
    return next(iter(usable_isas()), "")


@cache
def load(isa: str) -> ctypes.CDLL:
    """Load the library for one of the built instruction sets.

    Raises:
        OSError: It cannot be loaded; `python -m triptych_kernels.cpu.build` makes it anew.
    """
    return ctypes.CDLL(str(library_path(isa)))


def use_threads(count: int) -> None:
    """Compute with this many threads, including the caller's. Without a library this does nothing.

    A forked child computes with as many threads of its own.

    Raises:
        RuntimeError: The system does not start so many; the caller's thread then computes by itself.
    """
    if isa():
        function = load(isa()).triptych_set_threads
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
        raise_failure(function(count), f"{count} threads")


def raise_failure(failure: int, what: str) -> None:
    """Raise the exception for a result of the library: `Failure` in kernel.h, 0 for none.

    Args:
        what: Subject of the message.
    """
    if failure == 0:
        return
    if failure == _NO_MEMORY:
        raise MemoryError(f"{what}: the system has no memory for what the native kernels need while they run")
    raise RuntimeError(
        f"{what}: the system starts no further thread; look at `ulimit -u` and at the container's limit of processes"
    )


def processor_flags() -> set[str]:
    """Return the instruction sets that the processor names; empty if the system does not list them."""
    if sys.platform == "darwin":
        return _flags_of_sysctl()
    if not CPUINFO.is_file():
        return set()
    for line in CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _flags_of_sysctl() -> set[str]:
    """Return the flags of a Mac with an Intel processor, in Linux's spelling: macOS writes `AVX2` for `avx2`."""
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.lower().split())
