"""Describes the machine that figures come from."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

from triptych.host import cpu_flags, cpu_name, usable_cores

BUSY_LOAD = 0.5
"""Load average above which others compute: a peer gave 512 tokens/s beside a compiler instead of 705."""
_NAMED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def describe() -> dict[str, Any]:
    """Return what a reader of the figures needs to know."""
    machine = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "cpu_flags": [flag for flag in _NAMED_FLAGS if flag in cpu_flags()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if shutil.which(_NVIDIA_SMI[0]):
        machine["gpu"] = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, check=False
        ).stdout.strip()
    return machine


def compute_cpus(root: Path = Path("/"), allowed: Collection[int] | None = None) -> tuple[int, ...]:
    """Return one logical CPU per physical core that this process may use, within its CPU quota.

    Args:
        root: Directory that holds `proc` and `sys`.
        allowed: Logical CPUs; None for those that the kernel allows.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    core_to_cpu: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core_to_cpu.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return tuple(core_to_cpu.values())[: usable_cores(root, allowed)]
