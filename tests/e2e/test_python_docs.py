"""The programs in the README and in pages of docs/ run as they stand, against a stack that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import ADDRESS_ENV, ADMIN_ADDRESS_ENV

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]


def programs_of(path: Path) -> list[str]:
    """The path's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docs/python.md", marks=pytest.mark.thorough),
        pytest.param("docs/api/structured.md", marks=pytest.mark.thorough),
        "README.md",
    ],
)
def test_programs_run(
    name: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS_ENV, cluster.address)
    monkeypatch.setenv(ADMIN_ADDRESS_ENV, cluster.admin_address)
    programs = programs_of(ROOT / name)
    assert len(programs) > 1
    scope: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, name, "exec"), scope)
    assert "Paris" in capsys.readouterr().out or name != "docs/python.md"
