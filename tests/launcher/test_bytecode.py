"""The place of compiled modules, by what Python itself then writes and reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.launcher.process import with_bytecode_cache

FORBIDDEN = {"PYTHONDONTWRITEBYTECODE": "1"}
PREFIX = "PYTHONPYCACHEPREFIX"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "sources" / "module.py"
    path.parent.mkdir()
    path.write_text("value = 1\n")
    return path


def import_source(source: Path, env: dict[str, str]) -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [sys.executable, "-c", "import module"], cwd=source.parent, env={**kept, **env}, check=True
    )


def compiled(directory: Path) -> list[str]:
    return [path.name.partition(".")[0] for path in directory.rglob("*.pyc")]


def test_modules_are_compiled_into_the_cache_where_bytecode_is_forbidden(
    source: Path, tmp_path: Path
) -> None:
    import_source(source, with_bytecode_cache(FORBIDDEN, source))
    assert "module" in compiled(tmp_path / "home")
    assert not compiled(source.parent)


def test_sources_that_can_be_written_keep_their_bytecode(source: Path) -> None:
    env = {"OTHER": "x"}
    assert with_bytecode_cache(env, source) == env
    import_source(source, with_bytecode_cache({}, source))
    assert compiled(source.parent) == ["module"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_modules_are_compiled_into_the_cache_where_sources_cannot_be_written(source: Path) -> None:
    source.parent.chmod(0o555)
    try:
        assert PREFIX in with_bytecode_cache({}, source)
    finally:
        source.parent.chmod(0o755)


def test_what_was_compiled_with_the_sources_is_used(source: Path) -> None:
    import_source(source, {})
    assert with_bytecode_cache(FORBIDDEN, source) == FORBIDDEN
    source.write_text("value = 12\n")  # of another size: what was compiled is stale
    assert PREFIX in with_bytecode_cache(FORBIDDEN, source)


def test_a_directory_that_is_set_stays(source: Path) -> None:
    env = {**FORBIDDEN, PREFIX: "/elsewhere"}
    assert with_bytecode_cache(env, source) == env


def test_a_cache_that_cannot_be_made_changes_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert with_bytecode_cache(FORBIDDEN, source) == FORBIDDEN
