"""Runs the tests that need a CUDA device, with the Python that runs this: a bare GPU machine will do.

    python3 tools/test_gpu.py [folders or files of tests] [options of pytest]

It needs torch, triton, numpy, safetensors, transformers and pytest; no installed Triptych, no plug-in of pytest, no
gRPC and no network. Nearly all of its time goes into compiling some hundreds of kernels, so where pytest-xdist is
installed several processes share the tests. Those that time the device have it to themselves, after that. Named
folders or files run in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("tests/gpu", "tests/kernels/ops", "tests/kernels/triton")
ALONE = ("tests/worker/gpu",)
MAX_PROCESSES = 8  # each holds a CUDA context, and some 4 GB of the host's memory
NO_TESTS = 5  # pytest's exit status where options deselect all
OPTIONS = (
    "-m", "gpu", "-rfEs", "--durations=10",
    "-p", "no:cacheprovider",
    # pyproject.toml configures plug-ins that may be missing
    "-W", "ignore::pytest.PytestConfigWarning",
    # in the place of pytest-timeout: says where a test hangs
    "-o", "faulthandler_timeout=300",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Return pytest's exit code, or 2 if no test could run."""
    try:
        import torch
    except ModuleNotFoundError:
        print(f"test-gpu: {sys.executable} has no torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"test-gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device", file=sys.stderr)
        return 2
    chosen = [argument for argument in arguments if argument.startswith("tests")]
    others = [argument for argument in arguments if not argument.startswith("tests")]
    if chosen:
        return _run(chosen, others)
    statuses = [_run(SHARED, others, num_processes=_num_processes()), _run(ALONE, others)]
    failed = [status for status in statuses if status not in (0, NO_TESTS)]
    return failed[0] if failed else min(statuses)


def _num_processes() -> int:
    if find_spec("xdist") is None:
        return 1
    return max(min(len(os.sched_getaffinity(0)), MAX_PROCESSES), 1)


def _run(paths: Sequence[str], options: Sequence[str], *, num_processes: int = 1) -> int:
    """Return pytest's exit code."""
    sources = [str(ROOT / name) for name in ("libs", "kernels", ".")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRITON_INTERPRET": "0",  # wherever the system keeps its device files
    }
    if num_processes > 1:
        options = ["-n", str(num_processes), "--dist", "worksteal", *options]
        num_threads = max(len(os.sched_getaffinity(0)) // num_processes, 1)
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))  # of the oracles on the CPU
    command = [sys.executable, "-m", "pytest", *OPTIONS, *paths, *options]
    return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
