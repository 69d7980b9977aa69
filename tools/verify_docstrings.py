"""Holds the words: a docstring begins with a plain sentence, and few idioms are left in sources and docs.

A docstring that begins as a fragment ("Of …", "What …", "None: …") is refused. Idioms that make readers stop are
counted: "nobody", "whose", "stands" and others have a plainer word. README, the docs, the protos and the sources count;
tests do not.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.ratchets import hold  # noqa: E402 - run as a script

FRAGMENT = re.compile(r"(Of|What|Whatever|Whom|Who|Whoever|Whose|Where|None|Nobody)\b")
IDIOM = re.compile(
    r"\b(nobody|whoever|somebody|lest|stands|whose"
    r"|so\s+long\s+ago|as\s+far\s+as|is\s+no\s+good|cannot\s+be\s+had|hears?\s+no\s+more)\b",
    re.IGNORECASE,
)
PROSE_SUFFIXES = (".py", ".md", ".proto", ".cpp", ".h", ".toml", ".yaml")


def main() -> int:
    """Print each fragment, and the idioms if there are more than there may be; return 1 in either case."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in filter(None, listing.split("\0")) if (ROOT / name).is_file()]
    found = [
        f"{name}:{place}: begin with a plain sentence"
        for name in names
        if name.endswith(".py")
        for place in fragments((ROOT / name).read_text())
    ]
    idioms_found = [
        f"{name}:{place}"
        for name in names
        if is_prose(Path(name))
        for place in idioms((ROOT / name).read_text())
    ]
    held = [hold("docstrings that begin with a fragment", found), hold("idioms", idioms_found)]
    return 0 if all(held) else 1


def is_prose(path: Path) -> bool:
    """Return whether the idioms of a file count."""
    return (
        path.suffix in PROSE_SUFFIXES
        and path.parts[0] != "tests"
        and not path.stem.endswith(("_pb2", "_pb2_grpc"))
        and not path.is_relative_to("protos/triptych/compat")  # copied unchanged
        and path.name != "verify_docstrings.py"  # names them
    )


def fragments(text: str) -> Iterator[str]:
    """Yield line and beginning of each docstring of a source that begins as a fragment."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and FRAGMENT.match(node.value.value.lstrip())
        ):
            yield f"{node.lineno}: {node.value.value!r:.80}"


def idioms(text: str) -> Iterator[str]:
    """Yield line and word of each idiom of a text."""
    for match in IDIOM.finditer(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"


if __name__ == "__main__":
    sys.exit(main())
