"""Checks the documentation, rewrites what is made from the code, or builds the site; `make verify-docs`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.docs import decisions, options, pages, site

ROOT = Path(__file__).resolve().parents[2]
ADR = Path("docs/adr")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("verify", "fix", "site"))
    command = parser.parse_args().command
    if command == "site":
        return site.build(ROOT)
    if command == "fix":
        for path, text in generated().items():
            (ROOT / path).write_text(text)
        return 0
    found = errors()
    for error in found:
        print(f"verify-docs: {error}", file=sys.stderr)
    return 1 if found else 0


def generated() -> dict[Path, str]:
    """Return path -> text of every page that is made from other files, in whole or in part."""
    texts = {ADR / "README.md": decisions.index(decisions.read(ROOT / ADR)[0])}
    for page in pages.tracked(ROOT, "docs/**.md"):
        text = (ROOT / page).read_text()
        if options.TABLE.search(text):
            texts[page] = options.filled(text)
    return texts


def errors() -> list[str]:
    found = decisions.read(ROOT / ADR)[1]
    found += [
        f"{path}: not what its sources say; run make fix-docs"
        for path, text in generated().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text() != text
    ]
    files = pages.tracked(ROOT)
    for page in pages.tracked(ROOT, "*.md"):
        found += pages.broken_links(ROOT, page)
        if not page.is_relative_to("docs/notebook") and not page.is_relative_to("benchmarks/results"):
            found += pages.broken_commands(ROOT, page)  # the two keep what was run on their day
        if (page.parts[0] == "docs" and page.parts[1] not in ("adr", "notebook")) or page.name == "README.md":
            found += pages.broken_paths(ROOT, page, files)
        if page.parts[0] == "docs" or page == Path("README.md"):
            found += pages.wide_lines(ROOT, page)
    for file in pages.tracked(
        ROOT, "*.py", "*.md", "*.proto", "*.yaml", "*.yml", "*.toml", "Makefile", "*.h", "*.cpp"
    ):
        found += pages.broken_mentions(ROOT, file)
    return found


if __name__ == "__main__":
    sys.exit(main())
