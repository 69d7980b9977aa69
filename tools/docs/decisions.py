"""Reads the decision records of docs/adr, checks their heads and writes their index."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.docs.pages import WIDTH

NAME = re.compile(r"(?P<number>\d{4})-[a-z0-9-]+\.md")
TITLE = re.compile(r"# (?P<number>\d+)\. (?P<sentence>[A-Z`].*[^.])")
STATUS = re.compile(r"\*\*Status\.\*\* (?P<status>Accepted|Superseded by \d+), (?P<date>\d{4}-\d\d-\d\d)\.")
INDEX_HEAD = """\
# Decisions

One record for each decision that a reader of the code would ask about: what was decided, instead of what, and
at what price. A record is not rewritten when a later one changes it; its status then names the later one.

A new record takes the next free number. It begins with `# N. Sentence`, then `**Status.** Accepted, DATE.`,
then Context, Decision, Instead of, Price. This index is written by `make fix-docs`.

| | decision | status | date |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """The head of one record."""

    number: int
    sentence: str
    status: str
    date: str
    file: str


def read(folder: Path) -> tuple[list[Decision], list[str]]:
    """Return the records in the order of their numbers, and a line for each that has a wrong head."""
    decisions: list[Decision] = []
    errors: list[str] = []
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        title, _, rest = path.read_text().partition("\n")
        name, head, status = (
            NAME.fullmatch(path.name),
            TITLE.fullmatch(title),
            STATUS.match(rest.lstrip("\n")),
        )
        if name is None:
            errors.append(f"{path.name}: its name is not NNNN-words.md")
        elif head is None or int(head["number"]) != int(name["number"]):
            errors.append(f"{path.name}: its first line is not `# {int(name['number'])}. Sentence`")
        elif status is None:
            errors.append(f"{path.name}: its second paragraph is not `**Status.** Accepted, YYYY-MM-DD.`")
        else:
            number = int(head["number"])
            if decisions and decisions[-1].number == number:
                errors.append(f"{path.name}: {decisions[-1].file} has the number {number}, too")
            decisions.append(Decision(number, head["sentence"], status["status"], status["date"], path.name))
    return decisions, errors


def index(decisions: list[Decision]) -> str:
    """Return the text of docs/adr/README.md."""
    rows = (f"| {d.number} | [{d.sentence}]({d.file}) | {d.status} | {d.date} |\n" for d in decisions)
    unused = ", ".join(str(number) for number in _gaps(decision.number for decision in decisions))
    gaps = textwrap.fill(f"Numbers that no record has: {unused}.", WIDTH)
    return INDEX_HEAD + "".join(rows) + (f"\n{gaps}\n" if unused else "")


def _gaps(numbers: Iterable[int]) -> Iterator[int]:
    taken = set(numbers)
    return (number for number in range(1, max(taken, default=0)) if number not in taken)
