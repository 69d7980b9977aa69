"""Holds hand-written sources outside the tests within 600 lines each, and names those above 400."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARN_LINES = 400
"""Above it a file is named: it may have grown a second reason to change."""
LIMIT_LINES = 600
SUFFIXES = (".py", ".cpp", ".h", ".proto")


def main() -> int:
    sizes = sorted(((line_count(path), path) for path in sources()), reverse=True)
    for num_lines, path in sizes:
        if num_lines > WARN_LINES:
            print(f"{num_lines:5} {path}")
    too_long = [f"{path} has {num_lines} lines" for num_lines, path in sizes if num_lines > LIMIT_LINES]
    for problem in too_long:
        print(f"verify-sizes: {problem}, the limit is {LIMIT_LINES}: split it by nouns", file=sys.stderr)
    return 1 if too_long else 0


def sources() -> list[Path]:
    """Relative to the root: what git knows or would add, less tests, generated stubs and copies."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        path
        for name in filter(None, listing.split("\0"))
        if (path := Path(name)).suffix in SUFFIXES
        and path.parts[0] != "tests"
        and not path.stem.endswith(("_pb2", "_pb2_grpc"))
        and not path.is_relative_to("protos/triptych/compat")  # copied as it stands
        and (ROOT / path).is_file()
    ]


def line_count(path: Path) -> int:
    return len((ROOT / path).read_bytes().splitlines())


if __name__ == "__main__":
    sys.exit(main())
