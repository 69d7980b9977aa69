"""The public protos serve a client in Go: examples/go, built by the toolchain of the machine, if it has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.launcher.local_cluster import LocalCluster

TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(bool(MISSING), reason=f"Go's toolchain is not installed: no {', '.join(MISSING)}"),
]

ROOT = Path(__file__).resolve().parents[2]
GO_LIBRARIES = "/usr/share/gocode"  # of Debian's packages
BUILD_S = 300.0
RUN_S = 180.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built from stubs that are generated here."""
    workspace = tmp_path_factory.mktemp("go_client")
    source = workspace / "src"
    source.mkdir()
    protos = sorted(str(path) for path in (ROOT / "protos/triptych/v1").glob("*.proto"))
    generate = [
        "protoc",
        "-I",
        str(ROOT / "protos"),
        f"--go_out={source}",
        f"--go-grpc_out={source}",
        *protos,
    ]
    subprocess.run(generate, check=True, timeout=BUILD_S)
    libraries = os.environ.get("GOPATH", GO_LIBRARIES)
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": f"{workspace}:{libraries}"}
    binary = workspace / "generate"
    build = ["go", "build", "-o", str(binary), str(ROOT / "examples/go/main.go")]
    subprocess.run(build, check=True, timeout=BUILD_S, env=environment)
    return binary


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=RUN_S, env=environment, check=False
    )


def test_a_go_client_prints_the_answer_and_its_usage(cluster: LocalCluster, program: Path) -> None:
    done = run(program, cluster.address, "What is the capital of France?")
    assert (done.returncode, done.stderr) == (0, "")
    text, usage = done.stdout.splitlines()
    assert text == "The capital of France is Paris."
    assert re.fullmatch(r"usage: [1-9]\d* prompt tokens \(\d+ cached\), [1-9]\d* output tokens", usage)


def test_a_go_client_learns_which_field_is_wrong(cluster: LocalCluster, program: Path) -> None:
    done = run(program, cluster.address, "Hi", "3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "InvalidArgument: sampling.temperature: 3 is above the limit 2",
        "  reason: INVALID_REQUEST (triptych.dev)",
        "  sampling.temperature: 3 is above the limit 2",
    ]
