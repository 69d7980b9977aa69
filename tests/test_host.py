"""Cores, memory and flags, read from machines laid out as files."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from triptych import host

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with two sockets of two cores with two threads each, and 8 GiB available."""
    lines = []
    for cpu in range(8):
        socket, core = divmod(cpu % 4, 2)  # 4..7 are the siblings of 0..3
        lines.append(
            f"processor\t: {cpu}\nmodel name\t: Testor 9\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
            f"flags\t\t: fpu avx2 avx512_bf16\n"
        )
    write(tmp_path, "proc/cpuinfo", "\n".join(lines))
    write(tmp_path, "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.mark.parametrize(
    ("affinity", "cores"), [(range(8), 4), ({0, 4}, 1), ({0, 1, 2}, 3), ({7}, 1), ({0, 99}, 2)]
)
def test_siblings_count_as_one_core_and_only_where_we_may_run(root, affinity, cores):
    assert host.usable_cores(root, affinity) == cores


def test_cpus_without_topology_count_one_core_each(tmp_path):
    write(tmp_path, "proc/cpuinfo", "processor: 0\nprocessor: 1\nprocessor: 2\n")
    assert host.usable_cores(tmp_path, {0, 2}) == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1)])
def test_a_cpu_quota_limits_the_cores(root, quota, cores):
    write(root, "proc/self/cgroup", "0::/pod/worker\n")
    write(root, "sys/fs/cgroup/pod/cpu.max", quota + "\n")
    assert host.usable_cores(root, range(8)) == cores


@pytest.mark.parametrize(
    ("outer", "inner", "cpus"),
    [(None, None, 8), (None, 300_000, 3), (300_000, None, 3), (150_000, 300_000, 2), (1_600_000, None, 8)],
)
def test_the_tightest_quota_limits_logical_cpus(root, outer, inner, cpus):
    write(root, "proc/self/cgroup", "0::/pod/frontend\n")
    for group, quota in (("pod", outer), ("pod/frontend", inner)):
        write(root, f"sys/fs/cgroup/{group}/cpu.max", f"{quota or 'max'} 100000\n")
    assert host.usable_cpus(root, range(8)) == cpus
    assert host.usable_cpus(root, {3}) == 1


def test_a_version_1_cpu_quota_limits_the_cores(root):
    write(root, "proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000\n")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert host.usable_cores(root, range(8)) == 3


def test_flags_and_name_are_those_of_the_first_cpu(root):
    assert host.cpu_flags(root) == {"fpu", "avx2", "avx512_bf16"}
    assert host.cpu_name(root) == "Testor 9"


def test_free_memory_without_control_groups_is_the_machines(root):
    assert host.free_memory(root) == 8 * GIB


def test_the_tightest_control_group_limits_memory(root):
    write(root, "proc/self/cgroup", "0::/pod/worker\n")
    for group, limit, used, inactive in (
        ("pod", 4 * GIB, 3 * GIB, GIB // 2),
        ("pod/worker", 6 * GIB, GIB, 0),
    ):
        write(root, f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        write(root, f"sys/fs/cgroup/{group}/memory.current", f"{used}\n")
        write(root, f"sys/fs/cgroup/{group}/memory.stat", f"anon 5\ninactive_file {inactive}\n")
    assert host.free_memory(root) == GIB + GIB // 2


def test_an_unlimited_group_limits_nothing(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    write(root, "sys/fs/cgroup/memory.current", "123\n")
    assert host.free_memory(root) == 8 * GIB


def test_a_version_1_limit_holds_inside_a_container(root):
    write(root, "proc/self/cgroup", "9:memory:/docker/0123abcd\n1:name=systemd:/docker/0123abcd\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert host.free_memory(root) == GIB


def test_the_version_1_number_for_unlimited_is_no_limit(root):
    write(root, "proc/self/cgroup", "9:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert host.free_memory(root) == 8 * GIB


def test_this_machine_answers():
    assert host.usable_cores() >= 1
    assert host.free_memory() > 0
    assert host.cpu_name()


@pytest.mark.parametrize(("affinity", "nodes"), [(range(8), 2), ({0, 1}, 1), ({3, 6}, 1), ({1, 6}, 2)])
def test_memory_nodes_count_where_their_cpus_are_ours(root, affinity, nodes):
    write(root, "sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
    write(root, "sys/devices/system/node/node1/cpulist", "2-3,6-7\n")
    write(root, "sys/devices/system/node/node2/cpulist", "\n")  # memory without CPUs
    assert host.numa_nodes(root, affinity) == nodes


def test_a_machine_that_tells_of_no_nodes_has_one(root):
    assert host.numa_nodes(root, {0}) == 1


@pytest.mark.parametrize(
    ("text", "mode"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]", "never"), (None, "none")],
)
def test_huge_pages_are_what_the_kernel_has_chosen(root, text, mode):
    if text is not None:
        write(root, "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert host.huge_pages(root) == mode


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without /proc, of ten CPUs and 16 GiB, whose system has fewer functions than Linux."""
    names = {name: key for name, key in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    pages = {"SC_PHYS_PAGES": 16 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "sysconf_names", names)
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    return tmp_path


def test_macos_answers_what_its_python_knows(macos):
    assert host.usable_cores(macos) == 10
    assert host.cpu_flags(macos) == frozenset()
    assert host.cpu_name(macos) == "arm"
    assert host.numa_nodes(macos) == 1
    assert host.huge_pages(macos) == "none"
    assert host.free_memory(macos) == 8 * GIB
    assert host.resident_memory(macos) == 0


def test_arm_tells_its_features_and_no_name(monkeypatch, tmp_path):
    write(
        tmp_path,
        "proc/cpuinfo",
        "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd i8mm bf16\n\nprocessor\t: 1\nFeatures\t: fp\n",
    )
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert host.cpu_flags(tmp_path) == {"fp", "asimd", "i8mm", "bf16"}
    assert host.cpu_name(tmp_path) == "aarch64"
    assert host.usable_cores(tmp_path, {0, 1}) == 2


def test_memory_is_told_by_the_c_library_where_the_kernel_is_old(root):
    write(root, "proc/meminfo", "MemTotal: 1 kB\n")
    assert host.free_memory(root) > 0
