"""The first session of docs/tutorial.md runs as it stands, against a stack that runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.command import exit_code
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import ADDRESS_ENV, ADMIN_ADDRESS_ENV

pytestmark = pytest.mark.model

TUTORIAL = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
SET_UP = ("make serve", "export PATH=")


@pytest.fixture(autouse=True)
def served_here(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_ENV, cluster.address)
    monkeypatch.setenv(ADMIN_ADDRESS_ENV, cluster.admin_address)


def commands() -> list[str]:
    text = "".join(block for language, block in BLOCKS if language == "sh").replace("\\\n", "")
    return [line for line in text.splitlines() if not line.startswith(SET_UP)]


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("triptych ")])
def test_command(command: str, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.replace("127.0.0.1:50051", cluster.address))
    code = exit_code(*words[1:])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out


def test_request_over_http(cluster: LocalCluster) -> None:
    [command] = [line for line in commands() if not line.startswith("triptych ")]
    curl, url, header_flag, header, data_flag, data = shlex.split(command)
    assert (curl, header_flag, data_flag) == ("curl", "-H", "-d")
    name, _, value = header.partition(": ")
    address = url.replace("127.0.0.1:8000", cluster.http_address)
    answer = httpx.post(address, content=data, headers={name: value}, timeout=60)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"], json.dumps(answer.json())


def test_programs(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for language, program in BLOCKS:
        if language == "python":
            here = program.replace("127.0.0.1:50051", cluster.address)
            exec(compile(here, "tutorial.md", "exec"), scope)
    said = capsys.readouterr().out
    assert "The capital of France is -> " in said
    assert said.splitlines()[-1] in ("yes", "no")
