"""Releases of a small repository: what is refused, and what a release writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import protos, release

CHANGELOG = """# Changelog

Text.

## [Unreleased]

### Added

- Wheels.

## [0.1.0] - 2026-11-24

- Everything.
"""
PROTO = """syntax = "proto3";
package triptych.{package}v1;
message Thing {{
  uint32 size = 1;
  string name = 2;
}}
"""
PACKAGES = {"v1": "", "admin/v1": "admin.", "internal/v1": "internal."}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository on main that was released once, as v0.1.0, and has notes of what came since."""
    root = tmp_path / "repository"
    write(root, "pyproject.toml", '[project]\nname = "triptych"\nversion = "0.1.0"\nreadme = "README.md"\n')
    write(root, "CHANGELOG.md", CHANGELOG)
    write(root, ".gitignore", "build/\n")
    for folder in ("base", "lws"):
        images = "images:\n  - {name: triptych-frontend, newTag: 0.1.0}\n  - {name: triptych-worker, newTag: 0.1.0}\n"
        write(root, f"deploy/kubernetes/{folder}/kustomization.yaml", images)
    write(root, "protos/buf.yaml", "version: v2\nbreaking:\n  use: [FILE]\n  ignore: [triptych/internal]\n")
    for folder, package in PACKAGES.items():
        write(root, f"protos/triptych/{folder}/thing.proto", PROTO.format(package=package))
    for module in (release, protos):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(protos, "PROTOS", root / "protos")
    monkeypatch.setattr(protos, "BUILD", root / "build")
    monkeypatch.setattr(protos, "RELEASED", root / "protos/public.binpb")
    monkeypatch.setattr(protos, "BEFORE", root / "protos/internal.binpb")
    for name, value in (("NAME", "Test"), ("EMAIL", "test@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    git(root, "init", "-q", "-b", "main")
    protos.release()
    commit(root)
    git(root, "tag", "--annotate", "v0.1.0", "--message", "Triptych 0.1.0")
    return root


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "project: change something")


def change(root: Path, name: str, before: str, after: str) -> None:
    text = (root / name).read_text()
    assert before in text
    write(root, name, text.replace(before, after))


def test_a_release(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert release.main(["0.2.0"]) == 0
    notes = "### Added\n\n- Wheels."
    captured = capfd.readouterr()
    assert captured.out.endswith(f"{notes}\n")
    assert "git push --atomic origin main v0.2.0" in captured.err
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "-1", "--format=%s") == "project: release 0.2.0"
    assert git(repository, "rev-parse", "v0.2.0^{commit}") == git(repository, "rev-parse", "HEAD")
    message = git(repository, "tag", "--list", "--format=%(contents)", "v0.2.0")
    assert message == f"Triptych 0.2.0\n\n{notes}", "its headlines are no comments"
    assert 'version = "0.2.0"' in (repository / "pyproject.toml").read_text()
    for folder in ("base", "lws"):
        text = (repository / f"deploy/kubernetes/{folder}/kustomization.yaml").read_text()
        assert (text.count("newTag: 0.2.0}"), text.count("0.1.0")) == (2, 0)
    changelog = (repository / "CHANGELOG.md").read_text()
    [date] = [line for line in changelog.splitlines() if line.startswith("## [0.2.0]")]
    expected = CHANGELOG.replace("## [Unreleased]\n", f"## [Unreleased]\n\n{date}\n")
    assert changelog == expected
    assert protos.last_release() == "v0.2.0"

    assert release.main(["0.3.0"]) == 1, "nothing new"
    assert "CHANGELOG.md: has nothing under [Unreleased]" in capfd.readouterr().err


def test_a_check_changes_nothing(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert release.main(["0.2.0", "--check"]) == 0
    assert "- Wheels." in capfd.readouterr().out
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag", "--list") == "v0.1.0"
    assert git(repository, "rev-parse", "HEAD") == git(repository, "rev-parse", "v0.1.0^{commit}")


def test_the_first_release(repository: Path) -> None:
    git(repository, "tag", "--delete", "v0.1.0")
    change(repository, "CHANGELOG.md", "### Added\n\n- Wheels.\n\n", "")
    change(repository, "CHANGELOG.md", "[0.1.0] - 2026-11-24", "[0.1.0]")
    commit(repository)
    assert release.main(["0.1.0"]) == 0
    assert "## [0.1.0] - 20" in (repository / "CHANGELOG.md").read_text()
    assert git(repository, "tag", "--list") == "v0.1.0"


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.2", "'0.2' is not MAJOR.MINOR.PATCH"),
        ("v0.2.0", "'v0.2.0' is not"),
        ("0.02.0", "'0.02.0' is not"),
        ("0.1.0", "there is a tag v0.1.0"),
        ("0.0.9", "0.0.9 is not above v0.1.0"),
    ],
)
def test_refused_versions(
    repository: Path, capfd: pytest.CaptureFixture[str], version: str, problem: str
) -> None:
    assert release.main([version]) == 1
    assert problem in capfd.readouterr().err
    assert git(repository, "status", "--porcelain") == ""


def test_versions_are_compared_as_numbers(repository: Path) -> None:
    git(repository, "tag", "v0.9.0")
    git(repository, "tag", "--delete", "v0.1.0")
    assert release.main(["0.10.0", "--check"]) == 0


def test_refused_trees(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(repository, "new.py", "")
    assert release.main(["0.2.0"]) == 1
    assert "tree: 1 files are not committed, as new.py" in capfd.readouterr().err
    commit(repository)
    git(repository, "checkout", "-q", "-b", "other")
    assert release.main(["0.2.0"]) == 1
    assert "releases are made on main, this is other" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("- Wheels.", "", "nothing under [Unreleased]"),
        ("## [Unreleased]", "## New", "no section [Unreleased]"),
        ("## [0.1.0] - 2026-11-24", "## [0.2.0]", "under [Unreleased] as well as under [0.2.0]"),
    ],
)
def test_refused_changelogs(
    repository: Path, capfd: pytest.CaptureFixture[str], before: str, after: str, problem: str
) -> None:
    if after == "":
        before = "### Added\n\n- Wheels.\n\n"
    change(repository, "CHANGELOG.md", before, after)
    commit(repository)
    assert release.main(["0.2.0"]) == 1
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize("package", PACKAGES)
def test_refused_protos(repository: Path, capfd: pytest.CaptureFixture[str], package: str) -> None:
    thing = f"protos/triptych/{package}/thing.proto"
    change(repository, thing, "string name = 2;", "string name = 2;\n  string more = 3;")
    commit(repository)
    assert protos.breaks_since("v0.1.0") == []
    change(repository, thing, "string name = 2;", "uint64 name = 2;")
    commit(repository)
    assert release.main(["0.2.0"]) == 1
    captured = capfd.readouterr()
    assert "release: protos: buf breaking" in captured.err
    assert "since v0.1.0 failed" in captured.err
    assert git(repository, "tag", "--list") == "v0.1.0"


def test_a_clone_without_tags_has_no_last_release(repository: Path) -> None:
    assert protos.last_release() == "v0.1.0"
    git(repository, "tag", "--delete", "v0.1.0")
    git(repository, "tag", "nightly")
    assert protos.last_release() is None
    assert protos.breaks_since(None) == []
