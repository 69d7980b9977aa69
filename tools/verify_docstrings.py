"""Refuses docstrings that begin as a fragment ("Of …", "What …", "None: …") instead of a plain sentence."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRAGMENT = re.compile(r"(Of|What|Whatever|Whom|Who|Whoever|Whose|Where|None|Nobody)\b")


def main() -> int:
    """Print each fragment with its place; return 1 if there is one."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        f"{name}:{node.lineno}: {node.value.value!r:.80}"
        for name in filter(None, listing.split("\0"))
        if (ROOT / name).is_file()
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and FRAGMENT.match(node.value.value.lstrip())
    ]
    for place in found:
        print(f"verify-docstrings: {place}: begin with a plain sentence", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
