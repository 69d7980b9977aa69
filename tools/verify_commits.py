"""Checks the subjects of commits: `area: imperative`, one idea, at most 72 characters; `make verify-commits`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES_SINCE = "64b30f9446d34e834f7588d2b3589206b9e9864c"
"""The last commit that was written before these rules."""
MAX_LENGTH = 72

SUBJECT = re.compile(r"(?P<areas>[a-z][\w.-]*(, [a-z][\w.-]*)*): (?P<what>\S.*)")
REVERT = re.compile(r'Revert "(?P<subject>.*)"')
"""Subject as `git revert` writes it: longer than the one that it repeats."""
TO_BE_FOLDED = re.compile("((fixup|squash|amend)! )+")
"""Words that git writes before the subject of a commit that is folded into another one before both land."""
NO_VERB = re.compile(
    "an?|the|its|their|our|this|these|those|that|each|every|all|some|many|no|one|two|how|what|when|where|why|who"
    "|it|they|we|and|or|not|now|new"
)
OTHER_FORM = re.compile(".*(ed|ing|[^s]s)")
IMPERATIVE = re.compile(
    "alias|bias|bring|embed|exceed|feed|focus|need|ping|proceed|ring|seed|shed|shred|speed|string|succeed"
)
"""Imperatives that look like another form of a verb."""


def main(arguments: list[str] | None = None) -> int:
    """Print each subject that breaks a rule; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", help="check the commits after this one (default: all that were written under the rules)"
    )
    parser.add_argument(
        "--message",
        type=Path,
        metavar="FILE",
        help="check this message of a commit to be made, for a hook of git",
    )
    given = parser.parse_args(arguments)
    if given.message is not None:
        subject = given.message.read_text().partition("\n")[0]
        checked = [("this commit", TO_BE_FOLDED.sub("", subject))] if not subject.startswith("Merge ") else []
    else:
        checked = subjects(ROOT, given.base)
    problems = [
        f"{commit}: {subject!r}: {problem}" for commit, subject in checked for problem in problems_of(subject)
    ]
    for problem in problems:
        print(f"verify-commits: {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(checked)} subjects of commits: all good")
    return 1 if problems else 0


def subjects(repository: Path, base: str | None) -> list[tuple[str, str]]:
    """Return short name and subject of each commit to be checked; merges are not.

    Without a base those after the last tag are, if they were written under the rules. A clone without the commit
    that the rules begin after is a shallow one, which has younger commits alone, or a new history that begins with
    a copy of the tree: there each commit is checked but a first one.

    Raises:
        subprocess.CalledProcessError: The base is no commit, or this is no repository.
    """
    if base is not None:
        excluded = [base]
    else:
        tag = git(repository, "describe", "--tags", "--abbrev=0", check=False).strip()
        excluded = [name for name in (tag, RULES_SINCE) if name and has_commit(repository, name)]
    lines = git(
        repository, "log", "--no-merges", "--format=%h%x00%P%x00%s", "HEAD", "--not", *excluded, "--"
    ).splitlines()
    commits = [line.split("\0") for line in lines]
    return [(name, subject) for name, parents, subject in commits if parents]


def has_commit(repository: Path, name: str) -> bool:
    return git(repository, "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}", check=False) != ""


def problems_of(subject: str) -> Iterator[str]:
    """Yield what a subject breaks, each with the rule."""
    if revert := REVERT.fullmatch(subject):
        subject = revert["subject"]
    parts = SUBJECT.fullmatch(subject)
    if parts is None:
        yield "must be `area: imperative`, the area in lower case"
        return
    if len(subject) > MAX_LENGTH:
        yield f"has {len(subject)} characters, the limit is {MAX_LENGTH}"
    if subject.endswith("."):
        yield "must not end in a period"
    if ";" in parts["what"]:
        yield "holds two ideas, joined by a semicolon"
    word = parts["what"].split()[0].rstrip(",").lower()
    if NO_VERB.fullmatch(word) or (OTHER_FORM.fullmatch(word) and not IMPERATIVE.fullmatch(word)):
        yield f"must begin with an imperative after the area, not with {word!r}"


def git(repository: Path, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=None if check else subprocess.DEVNULL,
        text=True,
        check=check,
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
