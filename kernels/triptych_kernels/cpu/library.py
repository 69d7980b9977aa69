"""The native library for this processor, loaded once."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch  # before our library: its OpenMP then serves both, with one pool of threads

from triptych_kernels.cpu.build import DIGEST, ISA_FLAGS, library_path

_CPUINFO = Path("/proc/cpuinfo")
_NEEDED_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "avx2": {"avx2", "fma"},
}
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What the kernels compute with, and how their functions are called for it."""


@cache
def isa() -> str:
    """The instruction set that is used: the widest built and understood here; empty: none is, and plain torch
    serves."""
    if platform.machine() != "x86_64" or not DIGEST.is_file():
        return ""
    flags = _processor_flags()
    return next((isa for isa in ISA_FLAGS if flags >= _NEEDED_FLAGS[isa]), "")


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library for one of those that were built.

    Raises:
        OSError: it cannot be loaded; `python -m triptych_kernels.cpu.build` makes it anew.
    """
    return ctypes.CDLL(str(library_path(isa)))


def _processor_flags() -> set[str]:
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
