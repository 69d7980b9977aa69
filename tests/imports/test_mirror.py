"""Tests lie where their sources lie: below `tests/` as below the root of a package."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_THE_WHOLE = {
    "calls", "chaos", "clients", "deploy", "e2e", "gpu", "helpers", "imports", "oracle", "skew", "wire",
}  # fmt: skip
"""Folders of tests of more than one part; docs/structure.md says what each is for."""
SOURCES = {"benchmarks": "benchmarks", "kernels": "kernels/triptych_kernels", "tools": "tools"} | {
    service: f"services/{service}" for service in ("frontend", "enginecore", "worker")
}
"""Folder of tests -> that of its sources; all others are packages of `libs/triptych`."""
OTHERS = {
    "tests/wire_codecs": "libs/triptych/wire",  # `wire` is taken
    "tests/worker/gpu": "services/worker",  # tests of several parts, which need a device
}


def folder_of_sources(folder: Path) -> Path | None:
    """Return where the sources of the tests of a folder are; None for tests of more than one part."""
    if str(folder) in OTHERS:
        return Path(OTHERS[str(folder)])
    if len(folder.parts) == 1:
        return Path("libs/triptych")
    first, rest = folder.parts[1], folder.parts[2:]
    if first in OF_THE_WHOLE:
        return None
    return Path(SOURCES.get(first, f"libs/triptych/{first}"), *rest)


def misplaced(root: Path) -> list[str]:
    """Return what is wrong with each test file that is not where its sources are."""
    problems = []
    for test in sorted((root / "tests").rglob("test_*.py")):
        sources = folder_of_sources(test.parent.relative_to(root))
        if sources is None:
            continue
        name = test.relative_to(root)
        if not (root / sources).is_dir():
            problems.append(f"{name}: there is no {sources}")
            continue
        module = test.name.removeprefix("test_")
        homes = sorted(path.relative_to(root / sources) for path in (root / sources).rglob(module))
        if homes and Path(module) not in homes and len(homes) == 1 and str(test.parent) not in OTHERS:
            problems.append(f"{name}: {sources / homes[0]} is what it is called after; its tests lie in "
                            f"{test.parent.relative_to(root) / homes[0].parent}")  # fmt: skip
    return problems


def test_each_test_lies_where_its_sources_do() -> None:
    assert misplaced(ROOT) == []


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("frontend/streams/test_pacing.py", ""),
        ("frontend/streams/test_many_at_once.py", ""),
        ("e2e/some/test_stack.py", ""),
        ("rpc/test_status.py", ""),
        ("frontend/test_pacing.py", "its tests lie in tests/frontend/streams"),
        ("frontend/pacing/test_rate.py", "there is no services/frontend/pacing"),
        ("mpc/test_status.py", "there is no libs/triptych/mpc"),
    ],
)
def test_a_test_elsewhere_is_named(tmp_path: Path, test: str, problem: str) -> None:
    for path in ("services/frontend/streams/pacing.py", "libs/triptych/rpc/status.py", f"tests/{test}"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    problems = misplaced(tmp_path)
    assert len(problems) == bool(problem)
    assert all(problem in each for each in problems)
