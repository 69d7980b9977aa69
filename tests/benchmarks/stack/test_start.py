"""The state of bytecode beside the figures of a start."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.harness.process_tree import cpu_seconds, descendants
from benchmarks.harness.processes import Child
from benchmarks.stack import start


def test_modules_with_bytecode_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "counted" / "inner"
    package.mkdir(parents=True)
    modules = [package.parent / "__init__.py", package / "__init__.py", package / "module.py"]
    for module in modules:
        module.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(start, "PACKAGES", ("counted", "no_such_package"))
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert start.bytecode_state() == "bytecode of 0 of 3 modules is there, and is not written"
    cached = Path(importlib.util.cache_from_source(str(modules[2])))
    cached.parent.mkdir(parents=True)
    cached.touch()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert start.bytecode_state() == "bytecode of 1 of 3 modules is there, and is written"


def test_cpu_time_counts_processes_that_have_ended() -> None:
    program = (
        "import json, os, subprocess, sys\n"
        "busy = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "subprocess.run([sys.executable, '-c', busy], check=True)\n"
        "print(json.dumps({'cpu_s': sum(os.times()[:4])}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with Child([sys.executable, "-c", program]) as child:
        cpu_s = child.receive(60)["cpu_s"]
        assert cpu_s > 0.25  # 0.3, but for ticks
        # The kernel counts in ticks of 10 ms; after its answer the process only waits.
        assert cpu_s - 0.05 < cpu_seconds(descendants([child.pid])) < cpu_s + 0.3
