"""Subjects of commits against their rules, and which commits are held to them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import verify_commits
from tools.verify_commits import MAX_LENGTH, problems_of, subjects


@pytest.mark.parametrize(
    "subject",
    [
        "enginecore: begin a pull behind the steps before it",
        "frontend: sort its files into requests, streams and routing",
        "worker, kernels: pass strides by name",
        "tests: need no network",
        "docs: bring figures up to date",
        "rpc: process acks in batches",
        "kernels: feed AMX from packed tiles",
        'Revert "worker: keep masks of rows that are late in a queue of their own"',
        "requirements: bump numpy from 2.3.1 to 2.3.2",
        "tools: " + "x" * (MAX_LENGTH - len("tools: ")),
    ],
)
def test_good_subjects(subject: str) -> None:
    assert list(problems_of(subject)) == []


@pytest.mark.parametrize(
    ("subject", "word"),
    [
        ("fix the scheduler", "area: imperative"),
        ("Frontend: keep streams", "area: imperative"),
        ("frontend:keep streams", "area: imperative"),
        ("fixup! frontend: keep streams", "area: imperative"),
        ("frontend: keep streams.", "period"),
        ("frontend: keep streams; drop sinks", "two ideas"),
        ("frontend: added a counter", "'added'"),
        ("frontend: adding a counter", "'adding'"),
        ("frontend: adds a counter", "'adds'"),
        ("frontend: requests have a head", "'requests'"),
        ("frontend: the streams are kept", "'the'"),
        ('Revert "frontend: keeps streams"', "'keeps'"),
        ("tools: " + "x" * (MAX_LENGTH + 1 - len("tools: ")), "73 characters, the limit is 72"),
    ],
)
def test_bad_subjects(subject: str, word: str) -> None:
    (problem,) = problems_of(subject)
    assert word in problem


def git(repository: Path, *arguments: str) -> str:
    name = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *name, *arguments], cwd=repository, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(repository: Path, subject: str) -> str:
    git(repository, "commit", "-q", "--allow-empty", "-m", subject)
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with three commits: one before the rules, and two after."""
    path = tmp_path / "repository"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    monkeypatch.setattr(verify_commits, "ROOT", path)
    commit(path, "Initial commit.")
    monkeypatch.setattr(verify_commits, "RULES_SINCE", commit(path, "Things; more things."))
    commit(path, "tools: add a rule")
    commit(path, "tools: apply the rule")
    return path


def checked(path: Path, base: str | None = None) -> list[str]:
    return [subject for _, subject in subjects(path, base)]


def test_only_commits_after_the_rules(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(repository) == ["tools: apply the rule", "tools: add a rule"]
    assert verify_commits.main([]) == 0
    assert "2 subjects" in capsys.readouterr().out


def test_a_bad_one_fails_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = commit(repository, "tools: added a test.")
    assert verify_commits.main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(bad[:7] in line and "'tools: added a test.'" in line for line in lines)


def test_message_of_a_commit_to_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("tools: check a message\n\nIt added; nothing. And more.\n")
    assert verify_commits.main(["--message", str(message)]) == 0
    message.write_text("tools: checks a message\n")
    assert verify_commits.main(["--message", str(message)]) == 1
    assert "this commit: 'tools: checks a message'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "subject",
    ["Merge branch 'main' into x", "fixup! tools: check a message", "squash! fixup! tools: check it"],
)
def test_what_git_writes_before_commits_are_folded(tmp_path: Path, subject: str) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(f"{subject}\n")
    assert verify_commits.main(["--message", str(message)]) == 0


def test_after_a_tag_and_after_a_base(repository: Path) -> None:
    git(repository, "tag", "v1.0.0")
    commit(repository, "tools: count once more")
    assert checked(repository) == ["tools: count once more"]
    assert checked(repository, base="HEAD~2") == ["tools: count once more", "tools: apply the rule"]
    git(repository, "tag", "v0.9.0", "HEAD~3")
    assert checked(repository) == ["tools: count once more"]


def test_a_tag_from_before_the_rules(repository: Path) -> None:
    git(repository, "tag", "v0.1.0", "HEAD~3")
    assert checked(repository) == ["tools: apply the rule", "tools: add a rule"]


def test_shallow_clone(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for depth, expected in ((1, []), (2, ["tools: apply the rule"]), (3, checked(repository))):
        clone = tmp_path / f"depth-{depth}"
        git(tmp_path, "clone", "-q", f"--depth={depth}", repository.as_uri(), str(clone))
        assert checked(clone) == expected
        monkeypatch.setattr(verify_commits, "ROOT", clone)
        assert verify_commits.main([]) == 0


def test_new_history_of_a_copied_tree(repository: Path) -> None:
    git(repository, "checkout", "-q", "--orphan", "copy")
    commit(repository, "Everything so far")
    assert checked(repository) == []
    commit(repository, "tools: go on")
    assert checked(repository) == ["tools: go on"]


def test_merges_are_not_checked(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "other", "HEAD~1")
    commit(repository, "tools: try another way")
    git(repository, "merge", "-q", "--no-ff", "main", "-m", "Merge branch 'main' into other")
    assert checked(repository) == ["tools: try another way", "tools: apply the rule", "tools: add a rule"]
