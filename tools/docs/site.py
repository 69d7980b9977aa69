"""Builds the site: every page of the repository at its own path, and the reference, with strict links.

    python -m tools.docs site            build/docs is what the site is made of, build/site the site

The generator has an environment of its own (`make docs` makes it), since its packages serve nothing else. A page may
link to a file or folder that is no page, as on GitHub: on the site such a link is plain text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tools.docs import pages, reference

CONFIG = Path("mkdocs.yml")
SOURCE, SITE = Path("build/docs"), Path("build/site")
GENERATOR = Path("build/docs-venv/bin/zensical")
FOLDER = re.compile(r"^(?P<indent> *)- (?P<folder>[\w./-]+)/$", re.MULTILINE)
"""An entry of the navigation that means the pages of a folder, without its README.md."""


def build(root: Path) -> int:
    """Assemble the pages and run the generator; return its exit code, or 1 where a page is in no menu."""
    assemble(root)
    config = navigation(root)
    missing = sorted(
        str(path.relative_to(root / SOURCE))
        for path in (root / SOURCE).rglob("*.md")
        if str(path.relative_to(root / SOURCE)) not in config
    )
    for page in missing:
        print(f"docs: {page} is in no menu of {CONFIG}")
    # The configuration is beside the pages: the generator takes its paths from where it is.
    (root / SOURCE.parent / CONFIG).write_text(config)
    shutil.rmtree(root / SITE, ignore_errors=True)
    command: list[str | Path] = [
        root / GENERATOR,
        "build",
        "--strict",
        "--clean",
        "--config-file",
        root / SOURCE.parent / CONFIG,
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        print(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr))
    return done.returncode or bool(missing)


def assemble(root: Path) -> None:
    """Write the pages that git knows, with links that the site can follow, and those made from the code."""
    names = [page for page in pages.tracked(root, "*.md") if is_shown(page)]
    shutil.rmtree(root / SOURCE, ignore_errors=True)
    shown = {root / name for name in names}
    texts = {name: linked((root / name).read_text(), root / name, shown) for name in names}
    texts |= {pages.REFERENCE / name: text for name, text in reference.pages(root).items()}
    for name, text in texts.items():
        target = root / SOURCE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def is_shown(page: Path) -> bool:
    """Return whether a page is part of the site: forms for issues and notes beside tests are not."""
    return page.parts[0] not in (".github", "tests")


def linked(text: str, page: Path, shown: set[Path]) -> str:
    """Return a page with links to what is no page as plain text, and to a folder as links to its README.md."""

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        path = (page.parent / target).resolve()
        if ":" in target or not target or path in shown:
            return match[0]
        if path / "README.md" in shown:
            return f"[{match['text']}]({target.rstrip('/')}/README.md{'#' * bool(anchor)}{anchor})"
        return match["text"]

    lines = dict(pages.text_lines(text))
    return "\n".join(
        re.sub(r"\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s]+)\)", link, line) if number in lines else line
        for number, line in enumerate(text.split("\n"), 1)
    )


def navigation(root: Path) -> str:
    """Return mkdocs.yml with each folder of its menus replaced by the folder's pages, the newest last."""

    def entries(match: re.Match[str]) -> str:
        files = sorted((root / SOURCE / match["folder"]).glob("*.md"))
        return "\n".join(
            f"{match['indent']}- {file.relative_to(root / SOURCE)}"
            for file in files
            if file.name != "README.md"
        )

    return FOLDER.sub(entries, (root / CONFIG).read_text())
