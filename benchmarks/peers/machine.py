"""The machine that figures come from."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.worker.context.host import cpu_flags, cpu_name, usable_cores

BUSY_LOAD = 0.5
"""A load average above it means that others compute: a peer gave 512 beside a compiler instead of 705 tokens/s."""


def compute_cpus(root: Path = Path("/"), allowed: Collection[int] | None = None) -> tuple[int, ...]:
    """One logical CPU per physical core that this process may use, within its CPU quota.

    Args:
        root: where `proc` and `sys` are found.
        allowed: logical CPUs; None: as the kernel says.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    cpu_of_core: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cpu_of_core.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return tuple(cpu_of_core.values())[: usable_cores(root, allowed)]


def describe() -> dict[str, Any]:
    """Facts that a reader of the figures needs."""
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": cpu_name(),
        "compute_cpus": list(compute_cpus()),
        "cpu_flags": [flag for flag in wanted if flag in cpu_flags()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
