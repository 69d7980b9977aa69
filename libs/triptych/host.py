"""The cores, the free memory and the instruction sets that the operating system grants this process.

Linux provides these in files under /proc and /sys. Elsewhere, as on macOS, Python's own functions provide less: every
core of the machine, half of its memory, no instruction set.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # every function takes another root, so that tests can lay out a machine of their own

_NO_LIMIT = 1 << 60  # cgroup v1 writes "unlimited" as a page-aligned 2**63, and no machine has an exbibyte


def usable_cores(root: Path = ROOT, affinity: Collection[int] | None = None) -> int:
    """Return the number of physical cores that this process may use, within its affinity and its CPU quota.

    Args:
        root: Directory that contains `proc` and `sys`.
        affinity: Logical CPUs allowed; None: as the kernel has it.
    """
    allowed = _allowed_cpus() if affinity is None else affinity
    core_of = _core_of_cpu(root)
    return _within_quota(len({core_of.get(cpu, ("", str(cpu))) for cpu in allowed}), root)


def usable_cpus(root: Path = ROOT, affinity: Collection[int] | None = None) -> int:
    """Return the number of logical CPUs that this process may use, within its affinity and its CPU quota.

    Args:
        affinity: As in `usable_cores`.
    """
    return _within_quota(len(_allowed_cpus() if affinity is None else affinity), root)


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Return the instruction set extensions of the first CPU as /proc/cpuinfo has them; empty without that file."""
    for key, text in _cpuinfo(root):
        if key in ("flags", "Features"):  # of x86, of ARM
            return frozenset(text.split())
    return frozenset()


def cpu_vendor(root: Path = ROOT) -> str:
    """Return what the first CPU calls its maker, such as GenuineIntel; empty if the kernel does not say."""
    return next((text for key, text in _cpuinfo(root) if key == "vendor_id"), "")


def cpu_name(root: Path = ROOT) -> str:
    """Return the marketing name of the first CPU, or its architecture, such as aarch64, if the kernel has no name."""
    name = next((text for key, text in _cpuinfo(root) if key == "model name"), "")
    return name or platform.processor() or platform.machine() or "cpu"


def numa_nodes(root: Path = ROOT, affinity: Collection[int] | None = None) -> int:
    """Return the number of memory nodes with CPUs that this process may use; 1 if the kernel does not list them.

    Args:
        affinity: As in `usable_cores`.
    """
    allowed = _allowed_cpus() if affinity is None else affinity
    nodes = [
        _read(node / "cpulist") for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    ]
    return max(1, sum(not _cpu_list(cpus).isdisjoint(allowed) for cpus in nodes))


def huge_pages(root: Path = ROOT) -> str:
    """Return the kernel's mode of transparent huge pages: `always`, `madvise` or `never`; `none` if it has none."""
    modes = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return modes.partition("[")[2].partition("]")[0] or "none"


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate, within the limits of its control groups."""
    return min([_available_memory(root), *_cgroup_free_memory(root)])


def resident_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory behind this process's pages; 0 if the kernel does not provide them."""
    sizes = _read(root / "proc/self/statm").split()  # in pages: all that is mapped, then what is resident
    return int(sizes[1]) * os.sysconf("SC_PAGE_SIZE") if sizes else 0


def _allowed_cpus() -> Collection[int]:
    """Return the logical CPUs that this process may run on; all of them on systems without affinity."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cpuinfo(root: Path) -> Iterator[tuple[str, str]]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, colon, text = line.partition(":")
        if colon:
            yield key.strip(), text.strip()


def _core_of_cpu(root: Path) -> dict[int, tuple[str, str]]:
    """Return logical CPU -> (socket, core), without CPUs of which the kernel names no core."""
    core_of: dict[int, tuple[str, str]] = {}
    cpu, socket = 0, "0"
    for key, text in _cpuinfo(root):
        if key == "processor":
            cpu, socket = int(text), "0"
        elif key == "physical id":
            socket = text
        elif key == "core id":
            core_of[cpu] = (socket, text)
    return core_of


def _available_memory(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        num_pages = os.sysconf("SC_AVPHYS_PAGES")
    else:  # macOS provides only the total; half of it is usually free
        num_pages = os.sysconf("SC_PHYS_PAGES") // 2
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _cgroup_free_memory(root: Path) -> Iterator[int]:
    """Yield the bytes left under each limit, not counting file pages that the kernel would drop first as used."""
    for group in _cgroups("memory", root):
        for limit_name, used_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(group / limit_name), _read(group / used_name)
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                yield max(0, int(limit) - int(used) + int(stat.get(cache_key, 0)))


def _within_quota(count: int, root: Path) -> int:
    """Return at most `count`, at least 1, and no more CPUs than the quotas of all control groups are worth."""
    quotas = (_cpu_quota(group) for group in _cgroups("cpu", root))
    return max(1, min([count, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _cpu_quota(group: Path) -> float | None:
    """Return the CPUs' worth of time per period that this control group may use; None if there is no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    return None


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of the control groups that this process is in, innermost first, version 2 or 1.

    Inside a container the kernel's path may be the host's; the group of the container is then the mount's root.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers and controller not in controllers.split(","):
            continue
        if controllers:
            mount /= controller
        group = PurePosixPath(path)
        for ancestor in (group, *group.parents):
            yield mount / str(ancestor).lstrip("/")


def _cpu_list(text: str) -> set[int]:
    """Parse a list of CPUs: `0-3,8` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _read(path: Path) -> str:
    """Return the content of a kernel file; empty if this kernel does not have it."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
