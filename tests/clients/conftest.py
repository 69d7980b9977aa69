"""One stack for all clients of others, and the ways to run their programs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import READY_S
from tests.e2e.test_simulated_stack import FREE_PORTS
from tests.helpers.node import CAPTURED, NODE, install_packages
from triptych.config.loader import load_config
from triptych.launcher.local_cluster import LocalCluster

HERE = Path(__file__).parent
PROGRAMS = HERE.parents[1] / "build" / "clients-venv" / "bin"
TIMEOUT_S = 300
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

RunProgram = Callable[..., str]


@pytest.fixture(scope="package")
def stack() -> Iterator[LocalCluster]:
    flags = {**FREE_PORTS, "model.dtype": "float32", "model.quantization": "none"}
    with LocalCluster(load_config(env={}, flags=flags)) as cluster:
        cluster.wait_ready(READY_S)
        yield cluster


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """Return a function that runs a program of the clients' environment and returns what it printed."""
    if (
        not PROGRAMS.is_dir()
    ):  # GBs that no other test needs; `make test-clients` installs them before it runs these
        pytest.skip("their environment is made by make test-clients")

    def run(name: str, *words: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **OFFLINE}
        done = subprocess.run(
            [str(PROGRAMS / name), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture
def run_python(run_program: RunProgram) -> Callable[[str, str], Any]:
    """Return a function that runs a program of python/ with an address and reads the JSON that it prints."""

    def run(name: str, address: str) -> Any:
        return json.loads(run_program("python", str(HERE / "python" / name), address).splitlines()[-1])

    return run


@pytest.fixture(scope="package")
def node_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of node/ with its packages installed."""
    return install_packages(HERE / "node", tmp_path_factory.mktemp("node_clients"))


@pytest.fixture
def run_node(node_clients: Path) -> Callable[[str, str], Any]:
    """Return a function that runs a program of node/ with an address and reads the JSON that it prints."""

    def run(name: str, address: str) -> Any:
        command = [str(NODE), name, address]
        done = subprocess.run(command, cwd=node_clients, timeout=TIMEOUT_S, check=False, **CAPTURED)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
