"""A cached directory is whole or absent, and built once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.errors import ModelError
from triptych.hub.cache import MARKER_FILE, build_directory_once, cache_home

BUILDER = """
import os, signal, sys
from pathlib import Path
from triptych.hub.cache import build_directory_once

def build(directory):
    (directory / "content").write_text("half")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    (directory / "content").write_text("whole")

build_directory_once(Path(sys.argv[1]), 1, build, progress=False)
"""


def writes(text: str) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        (directory / "content").write_text(text)

    return build


def refuses(directory: Path) -> None:
    raise AssertionError("must not build again")


def start_builder(target: Path, log: Path, mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(target), str(log), mode])


def test_a_complete_directory_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    assert build_directory_once(target, 1, writes("new"), progress=False) == target
    build_directory_once(target, 1, refuses, progress=False)
    assert (target / "content").read_text() == "new"


def test_another_version_of_the_builder_replaces_the_directory(tmp_path: Path) -> None:
    build_directory_once(tmp_path / "target", 1, writes("old"), progress=False)
    build_directory_once(tmp_path / "target", 2, writes("new"), progress=False)
    assert (tmp_path / "target" / "content").read_text() == "new"


@pytest.mark.parametrize(
    "damage",
    [
        lambda target: (target / MARKER_FILE).unlink(),
        lambda target: (target / MARKER_FILE).write_text("{"),
        lambda target: (target / MARKER_FILE).write_text("[]"),
        lambda target: (target / "content").write_text("cut"),
        lambda target: (target / "content").unlink(),
    ],
    ids=["no marker", "half a marker", "odd marker", "cut file", "lost file"],
)
def test_a_damaged_directory_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    target = build_directory_once(tmp_path / "target", 1, writes("first"), progress=False)
    damage(target)
    build_directory_once(target, 1, writes("again"), progress=False)
    assert (target / "content").read_text() == "again"


def test_what_a_killed_builder_left_is_redone_and_cleared(tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    assert start_builder(target, log, "die").wait(timeout=120) == -signal.SIGKILL
    assert not target.exists()
    assert list(tmp_path.glob(".target.partial-*"))
    assert start_builder(target, log, "live").wait(timeout=120) == 0
    assert (target / "content").read_text() == "whole"
    assert not list(tmp_path.glob(".target.partial-*"))


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start_builder(tmp_path / "target", log, "live") for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_a_failing_builder_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "content").write_text("half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_directory_once(tmp_path / "target", 1, fail, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file.*set TRIPTYCH_HOME"):
        build_directory_once(tmp_path / "file" / "target", 1, refuses, progress=False)


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.setenv("TRIPTYCH_HOME", "")
    assert cache_home() == Path.home() / ".cache" / "triptych"
