"""Every Triton kernel compiles for Hopper, as the launches of `calls.CALLS` ask, and fits the machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triptych_kernels
from tests.kernels.triton.calls import CALLS

ROOT = Path(__file__).parents[3]
KERNELS = Path(triptych_kernels.__file__).parent / "triton"
MAX_SHARED_BYTES = 227 * 1024  # of one program, CUDA C++ Programming Guide, compute capability 9.0
MAX_GRID = (2**31 - 1, 65535, 65535)
WIDEST_ACCESS = 16  # bytes of one thread's load or store, same

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1000),  # the first test waits for all kernels: minutes on a slow machine
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]] | str]:
    """Return the result of `compile_for_hopper`, by call."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_for_hopper"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, list[dict[str, Any]] | str] = json.loads(done.stdout)
    return outcome


@pytest.mark.parametrize("name", CALLS)
def test_compiles_for_hopper_within_its_limits(
    compiled: dict[str, list[dict[str, Any]] | str], name: str
) -> None:
    launches = compiled[name]
    assert not isinstance(launches, str), launches
    assert launches, "launches no Triton kernel"
    for launch in launches:
        assert launch["shared_bytes"] <= MAX_SHARED_BYTES, launch
        assert launch["stack_bytes"] == 0, f"spills registers: {launch}"
        assert not launch["hazards"], launch
        grid = launch["grid"]
        assert all(0 < size <= limit for size, limit in zip(grid, MAX_GRID, strict=False)), launch


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.is_memory_bound])
def test_what_memory_bounds_is_moved_in_whole_vectors(
    compiled: dict[str, list[dict[str, Any]] | str], name: str
) -> None:
    launches = compiled[name]
    assert not isinstance(launches, str), launches
    assert {launch["widest_access"] for launch in launches} == {WIDEST_ACCESS}


def test_every_kernel_is_launched_by_some_call(compiled: dict[str, list[dict[str, Any]] | str]) -> None:
    launched = {
        launch["kernel"]
        for launches in compiled.values()
        if not isinstance(launches, str)
        for launch in launches
    }
    assert sorted(_kernels() - launched) == [], (
        "add a call that launches them to MODEL_CALLS of the op's test file"
    )


def _kernels() -> set[str]:
    """The functions under `@triton.jit` that no other such function calls or hands on."""
    jitted: dict[str, ast.FunctionDef] = {}
    for path in KERNELS.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                jitted[f"{path.stem}.{node.name}"] = node
    used = {
        name.id for function in jitted.values() for name in ast.walk(function) if isinstance(name, ast.Name)
    }
    return {name for name in jitted if name.partition(".")[2] not in used}
