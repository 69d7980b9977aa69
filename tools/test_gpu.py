"""Runs the tests that need a CUDA device, with the Python that runs this: a bare GPU machine will do.

    python3 tools/test_gpu.py [options of pytest]

It needs torch, triton, numpy, safetensors, transformers and pytest; no installed Triptych, no plug-in of pytest, no
gRPC and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("tests/gpu", "tests/kernels/triton", "tests/worker/gpu")
OPTIONS = (
    "-m", "gpu", "-rfEs", "--durations=10",
    "-p", "no:cacheprovider",
    # pyproject.toml configures plug-ins that may be missing
    "-W", "ignore::pytest.PytestConfigWarning",
    # in the place of pytest-timeout: says where a test hangs
    "-o", "faulthandler_timeout=300",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """What pytest returns; 2 where no test could run."""
    try:
        import torch
    except ModuleNotFoundError:
        print(f"test-gpu: {sys.executable} has no torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"test-gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device", file=sys.stderr)
        return 2
    sources = [str(ROOT / name) for name in ("libs", "kernels", ".")]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    chosen = [argument for argument in arguments if argument.startswith("tests")] or PATHS
    others = [argument for argument in arguments if not argument.startswith("tests")]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *chosen, *others]
    return subprocess.call(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
