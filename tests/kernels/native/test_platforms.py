"""Other systems and processors than Linux on x86-64: everything imports, and plain torch computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych_kernels.cpu import library

PROGRAM = """
import mmap, os, platform, sys
import torch
from pathlib import Path

system, machine = sys.argv[1:]
sys.platform = system
platform.machine = lambda: machine
is_file, read_text = Path.is_file, Path.read_text

def no_proc(path):
    if str(path).startswith("/proc") and system != "linux":
        raise FileNotFoundError(path)
    return path

Path.read_text = lambda path, *args: read_text(no_proc(path), *args)
Path.is_file = lambda path: not (str(path).startswith("/proc") and system != "linux") and is_file(path)
if system != "linux":
    for name in ("sched_getaffinity", "register_at_fork"):
        delattr(os, name)
    for name in ("MADV_HUGEPAGE", "MAP_NORESERVE", "MAP_POPULATE"):
        if hasattr(mmap, name):
            delattr(mmap, name)

import importlib, pkgutil
import triptych_kernels
for folder in ("cpu", "ops", "torch", "reference", "weights"):
    package = importlib.import_module(f"triptych_kernels.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"triptych_kernels.{folder}.{module.name}")

from triptych_kernels.cpu import build, library, memory
from triptych_kernels.ops import linear
assert (library.isa(), library.usable_isas(), library.amx_refusal()) == ("", (), "")
library.use_threads(2)
assert not memory.zeros_in_huge_pages((1000, 1000), torch.float32).any()
assert linear(torch.ones(2, 3), torch.ones(5, 3)).eq(3).all()
build.main()
"""


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64")], ids=["Graviton", "Mac"]
)
def test_plain_torch_serves_where_no_kernels_are_written_for(system: str, machine: str) -> None:
    command = [sys.executable, "-c", PROGRAM, system, machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"native kernels: none, since they are written for x86-64 and this is {machine}")


def test_a_mac_with_an_intel_processor_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "FPU SSE4.2 F16C FMA AVX1.0\nRDWRFSGS BMI1 AVX2 AVX512F\n"
    monkeypatch.setattr(library.sys, "platform", "darwin")
    monkeypatch.setattr(
        library.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, printed)
    )
    assert {"avx2", "fma", "f16c", "avx512f"} <= library.processor_flags()
