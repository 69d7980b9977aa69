"""Print what matters in a bug report: versions, CPU, memory, GPU, options, and what the kernels do on this machine.

The machine's rates are measured at the first time, for up to two seconds, and kept if no other process disturbed that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from triptych.config.loader import iter_options
from triptych.config.option import ENV_PREFIX

_PACKAGES = (
    "triptych", "torch", "grpcio", "protobuf", "numpy", "tokenizers", "safetensors", "gguf",
    "huggingface_hub", "fastapi", "uvicorn", "transformers",
)  # fmt: skip
_PLACES = ("l1", "l2", "l3", "memory")
# What the kernels may use: vector width, half precision, int8 dot products, matrix units.
_CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip


_VARIABLES = (
    "TRIPTYCH_ADDRESS", "TRIPTYCH_ADMIN_ADDRESS", "TRIPTYCH_CONFIG", "TRIPTYCH_FAILPOINTS", "TRIPTYCH_HOME",
)  # fmt: skip
"""Variables besides the options of the config; a bug report may show their values."""
_EXAMINE = "triptych_services.worker.context.machine"
_EXAMINE_TIMEOUT_S = 120.0  # torch is imported, which a loaded machine takes long for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--instruction-set",
        default="auto",
        metavar="NAME",
        help="as worker.instruction_set: avx2, for instance",
    )


def run(arguments: argparse.Namespace) -> int:
    kernels = _examine(arguments.instruction_set)
    if arguments.json:
        found = {
            "versions": dict(_versions()),
            "machine": dict(_machine()),
            "gpus": [value for _, value in _gpus()],
            "options": dict(_options()),
            "kernels": kernels,
        }
        print(json.dumps(found, indent=2))
        return 0
    for name, value in (*_versions(), *_machine(), *_gpus(), *_options(), *_kernels(kernels)):
        print(f"{name:<16} {value}")
    return 0


def _examine(instruction_set: str) -> dict[str, Any]:
    """Return what the worker knows of its kernels here, or a dict with the one key `problem`.

    Another process imports torch, which the command itself does not.
    """
    command = [sys.executable, "-P", "-m", _EXAMINE, "--instruction-set", instruction_set]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_EXAMINE_TIMEOUT_S, check=False
        )
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"problem": f"not examined within {_EXAMINE_TIMEOUT_S:.0f} s"}
    except (IndexError, ValueError):
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return {"problem": f"not examined: {said[-1]}"}


def _kernels(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "problem" in found:
        yield "kernels", found["problem"]
        return
    yield "kernels", found["instruction_set"] or "none: plain torch"
    for isa, reason in found["why_not_wider"].items():
        yield f"  not {isa}", reason
    yield "huge pages", found["huge_pages"]
    if found["not_measured"]:
        yield "rates", f"not measured: {found['not_measured']}"
    else:
        yield "1 thread", _rates(found["rates_of_one_thread"])
        yield f"{found['threads']} threads", _rates(found["rates_of_all_threads"])
    for form, arithmetic in found["arithmetic"].items():
        yield f"  {form}", arithmetic
    for contradiction in found["contradictions"]:
        yield "  warning", contradiction


def _rates(measured: Mapping[str, float]) -> str:
    products, reads = (
        ", ".join(f"{name} {rate:.0f}" for name, rate in measured.items() if (name in _PLACES) == is_place)
        for is_place in (False, True)
    )
    return f"10^9 operations/s: {products}; GB/s from {reads}"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({platform.platform()})"
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)  # reads a file: importing torch would take seconds
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    cpu = read_key_values("/proc/cpuinfo")
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    yield "cpu", cpu.get("model name") or platform.machine()
    yield "cpu flags", " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none that matter"
    # macOS restricts no process to some of the CPUs, and has no /proc
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{usable} usable of {os.cpu_count()}, quota {_read_limit('cpu.max')}"
    memory = read_key_values("/proc/meminfo")
    if "MemAvailable" not in memory:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        yield "memory", f"{total:.1f} GiB"
        return
    total, available = (int(memory[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    yield "memory", f"{available:.1f} of {total:.1f} GiB available, limit {_read_limit('memory.max')}"


def _gpus() -> Iterator[tuple[str, str]]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        yield "gpu", "none (no nvidia-smi)"
        return
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        yield "gpu", "nvidia-smi does not answer"
        return
    said = ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
    for line in said.strip().splitlines() or [f"nvidia-smi exited with code {ended.returncode}"]:
        yield "gpu", line.strip()


def _options() -> Iterator[tuple[str, str]]:
    """Yield variables of the environment. Only those known to hold no secret come with their values."""
    shown = {*_VARIABLES, *(option.env for option in iter_options())}
    for name in sorted(name for name in os.environ if name.startswith(ENV_PREFIX)):
        yield name, os.environ[name] if name in shown else "set"


def read_key_values(path: str) -> dict[str, str]:
    """`key: value` lines of a kernel file, the first of each key; empty where there is no such file."""
    values: dict[str, str] = {}
    file = Path(path)
    for line in file.read_text().splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    return values


def _read_limit(name: str) -> str:
    """A limit of the control group, as the kernel writes it."""
    file = Path("/sys/fs/cgroup") / name
    return file.read_text().strip() if file.exists() else "none"
