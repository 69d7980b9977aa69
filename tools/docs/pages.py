"""Checks the pages of this repository: links, anchors, names of pages in sources, widths of lines."""

from __future__ import annotations

import re
import subprocess
import urllib.parse
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

WIDTH = 110
REFERENCE = Path("docs/reference")
"""Pages that are made for the site alone."""
FENCE = re.compile(r"\s*(```|~~~)")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"#{1,6} +(?P<text>.+?)(?: +#+)?")
MENTION = re.compile(r"(?<![\w./-])docs/[\w./-]*\w(?:\.md)?")
"""The path of a page, as comments, docstrings and messages name it."""

MAKE = re.compile(r"(?:^|`)make ([a-z][\w-]*)")
SOURCE = re.compile(r"`([\w-]+/[\w./-]+\.(?:py|proto|cpp|h|sh))`")
MODULE = re.compile(r"python -m ((?:benchmarks|tools|tests)[\w.]*\w)")


def tracked(root: Path, *patterns: str) -> list[Path]:
    """Return the files that git knows or would add, as paths relative to `root`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted({Path(name) for name in listing.split("\0") if name and (root / name).is_file()})


def text_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not in a fenced block."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced:
            yield number, line


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for _, line in text_lines(path.read_text()):
        heading = HEADING.fullmatch(line)
        if heading is not None:
            base = slug(heading["text"])
            repeats = sum(
                1 for other in found if other == base or re.fullmatch(f"{re.escape(base)}-\\d+", other)
            )
            found.add(f"{base}-{repeats}" if repeats else base)
    return frozenset(found)


def slug(heading: str) -> str:
    """Return the anchor of a heading: letters, digits, `-` and `_` in lower case, a hyphen for each space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")


def broken_links(root: Path, page: Path) -> Iterator[str]:
    """Yield a line for each link of a page to a file or anchor that does not exist; nothing is fetched."""
    for number, line in text_lines((root / page).read_text()):
        for link in LINK.finditer(re.sub(r"`[^`]*`", lambda code: "`" * len(code[0]), line)):
            parts = urllib.parse.urlsplit(link["target"])
            if parts.scheme or parts.netloc:
                continue
            target = (
                root / page if not parts.path else (root / page).parent / urllib.parse.unquote(parts.path)
            )
            if not target.exists():
                yield f"{page}:{number}: {link['target']}: no such file"
            elif (
                parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target.resolve())
            ):
                yield f"{page}:{number}: {link['target']}: no such heading"


def broken_mentions(root: Path, file: Path) -> Iterator[str]:
    """Yield a line for each page that a file names and that does not exist; records may be named by number alone."""
    for number, line in enumerate((root / file).read_text(errors="replace").splitlines(), 1):
        for mention in MENTION.findall(line):
            if Path(mention).is_relative_to(REFERENCE):
                continue
            if not (root / mention).exists() and not any(
                (root / mention).parent.glob(f"{Path(mention).name}-*")
            ):
                yield f"{file}:{number}: {mention}: no such page"


def broken_commands(root: Path, page: Path) -> Iterator[str]:
    """Yield a line for each `make TARGET` and `python -m MODULE` of this repository that there is not."""
    targets = make_targets(root / "Makefile")
    for number, line in enumerate((root / page).read_text().splitlines(), 1):
        for target in MAKE.findall(line):
            if target not in targets:
                yield f"{page}:{number}: make {target}: no such target"
        for module in MODULE.findall(line):
            path = root / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                yield f"{page}:{number}: python -m {module}: no such module"


def broken_paths(root: Path, page: Path, files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each source that a page names by folder and file and that no folder has.

    Args:
        files: Every file of the repository.
    """
    ends = {str(Path(*file.parts[start:])) for file in files for start in range(len(file.parts))}
    for number, line in text_lines((root / page).read_text()):
        for path in SOURCE.findall(line):
            if path not in ends and not re.search(r"\b[A-Z]{2,}\b|_[A-Z]+\b", path):
                yield f"{page}:{number}: {path}: no such file"


@cache
def make_targets(makefile: Path) -> frozenset[str]:
    """Return the targets that a person may ask for."""
    names = re.findall(r"^\.PHONY: (.+)$", makefile.read_text(), re.MULTILINE)
    return frozenset(name for line in names for name in line.split())


def wide_lines(root: Path, page: Path) -> Iterator[str]:
    """Yield a line for each line of prose that is too wide; tables, drawings, targets of links and long code may be."""
    for number, line in text_lines((root / page).read_text()):
        width = len(re.sub(r"\]\(\S+\)|`[^`]{60,}`", "]", line))
        if width > WIDTH and not line.startswith(("    ", "#", "<!--")) and not line.lstrip().startswith("|"):
            yield f"{page}:{number}: {width} columns of at most {WIDTH}"
