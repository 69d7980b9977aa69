"""Makes a release of this checkout: its version, its section of the changelog, a commit and a tag.

  make release VERSION=0.2.0 ARGS=--check    all checks and the notes; nothing is changed
  make release VERSION=0.2.0                 the same, then the commit and the tag v0.2.0; nothing is pushed

Checked are: a clean tree on main, a version above the last one, notes in CHANGELOG.md, and protos that clients of the
last release can use. The notes are its section "Unreleased", or that of the version itself.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools import protos

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "Unreleased"
BRANCH = "main"
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
SECTION = re.compile(
    r"^## \[(?P<name>[^]]+)\](?: - (?P<date>\S+))?\n(?P<text>.*?)(?=^## \[|\Z)", re.MULTILINE | re.DOTALL
)
PLACES = {
    "pyproject.toml": re.compile(r'(?<=^version = ")[^"]+(?="$)', re.MULTILINE),
    "deploy/kubernetes/base/kustomization.yaml": re.compile(r"(?<=newTag: )[^}\s]+"),
    "deploy/kubernetes/lws/kustomization.yaml": re.compile(r"(?<=newTag: )[^}\s]+"),
}
"""File -> where it names the version."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="MAJOR.MINOR.PATCH")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(arguments)
    problems = list(problems_of(given.version))
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if problems:
        return 1
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    changelog, notes = dated((ROOT / CHANGELOG).read_text(), given.version, today)
    if not given.check:
        write(given.version, changelog, notes)
    print(notes)
    if not given.check:
        print(f"To publish it: git push --atomic origin {BRANCH} v{given.version}", file=sys.stderr)
    return 0


def problems_of(version: str) -> Iterator[str]:
    """Yield why this cannot be released under the version."""
    if not VERSION.fullmatch(version):
        yield f"version: {version!r} is not MAJOR.MINOR.PATCH, as 0.2.0 is"
        return
    tag, last = f"v{version}", protos.last_release()
    if git("tag", "--list", tag):
        yield f"version: there is a tag {tag}"
    elif last is not None and numbers(version) <= numbers(last.removeprefix("v")):
        yield f"version: {version} is not above {last}, the last release"
    branch = git("branch", "--show-current")
    if branch != BRANCH:
        yield f"branch: releases are made on {BRANCH}, this is {branch or 'no branch'}"
    if changes := git("status", "--porcelain"):
        yield f"tree: {len(changes.splitlines())} files are not committed, as {changes.split()[1]}"
    try:
        dated((ROOT / CHANGELOG).read_text(), version, "")
    except ValueError as error:
        yield f"{CHANGELOG}: {error}"
    yield from (f"protos: {problem}" for problem in protos.breaks_since(last))


def numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version, to be compared."""
    return tuple(int(part) for part in version.split("."))


def dated(changelog: str, version: str, date: str) -> tuple[str, str]:
    """Return the changelog with a dated section of the version, and the text of that section.

    Raises:
        ValueError: There are no notes, or there are some in two places.
    """
    sections = {found["name"]: found for found in SECTION.finditer(changelog)}
    unreleased, own = sections.get(UNRELEASED), sections.get(version)
    if unreleased is None:
        raise ValueError(f"has no section [{UNRELEASED}]")
    new = unreleased["text"].strip()
    if own is None:
        if not new:
            raise ValueError(f"has nothing under [{UNRELEASED}]")
        head = f"## [{UNRELEASED}]\n\n## [{version}] - {date}\n\n"
        return changelog[: unreleased.start()] + head + changelog[unreleased.start("text") :].lstrip(
            "\n"
        ), new
    if new:
        raise ValueError(f"has notes under [{UNRELEASED}] as well as under [{version}]; move them")
    if not own["text"].strip():
        raise ValueError(f"has nothing under [{version}]")
    head = f"## [{version}] - {own['date'] or date}\n"
    return changelog[: own.start()] + head + changelog[own.start("text") :], own["text"].strip()


def write(version: str, changelog: str, notes: str) -> None:
    """Write version and changelog, hold later protos to those of now, commit and tag.

    Raises:
        SystemExit: A file names no version.
    """
    (ROOT / CHANGELOG).write_text(changelog)
    for name, pattern in PLACES.items():
        text, count = pattern.subn(version, (ROOT / name).read_text())
        if count == 0:
            raise SystemExit(f"release: {name}: names no version")
        (ROOT / name).write_text(text)
    protos.release()
    git("add", "--update")
    git("commit", "--quiet", "--message", f"project: release {version}")
    git(
        "tag",
        "--annotate",
        f"v{version}",
        "--cleanup=verbatim",
        "--message",
        f"Triptych {version}\n\n{notes}",
    )


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
