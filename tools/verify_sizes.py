"""Holds hand-written sources outside the tests within limits: files, functions and constructors.

| what        | limit                                                                                          |
|-------------|------------------------------------------------------------------------------------------------|
| file        | 600 lines; those above 400 are named                                                           |
| function    | 60 lines of its body, with comments and inner functions, without docstring and blank lines     |
| constructor | 10 arguments of `__init__` besides `self`; a dataclass is a table of fields and may have more  |
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARN_LINES = 400
"""Above it a file is named: it may have grown a second reason to change."""
LIMIT_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 10
SUFFIXES = (".py", ".cpp", ".h", ".proto")


def main() -> int:
    """Print the long files, and what is above a limit; return 1 if anything is."""
    problems = []
    texts = {path: (ROOT / path).read_text() for path in sources()}
    for num_lines, path in sorted(
        ((len(text.splitlines()), path) for path, text in texts.items()), reverse=True
    ):
        if num_lines > WARN_LINES:
            print(f"{num_lines:5} {path}")
        if num_lines > LIMIT_LINES:
            problems.append(f"{path} has {num_lines} lines, the limit is {LIMIT_LINES}: split it by nouns")
    for path, text in texts.items():
        if path.suffix == ".py":
            problems += [f"{path}:{problem}" for problem in oversized_functions(text)]
    for problem in problems:
        print(f"verify-sizes: {problem}", file=sys.stderr)
    return 1 if problems else 0


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


def oversized_functions(text: str) -> Iterator[str]:
    """Yield the line and the excess of each function and constructor of a source that is above its limit."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (num_lines := body_lines(node, lines)) > MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {num_lines} lines, the limit is {MAX_FUNCTION_LINES}"
        num_arguments = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
        if node.name == "__init__" and num_arguments > MAX_CONSTRUCTOR_ARGUMENTS:
            yield f"{node.lineno}: __init__ has {num_arguments} arguments, the limit is {MAX_CONSTRUCTOR_ARGUMENTS}"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the lines of a function's body that are neither blank nor of its docstring."""
    first = function.body[0]
    begin = first.lineno - 1
    if ast.get_docstring(function) is not None:
        begin += len(lines[begin : first.end_lineno])
    while not (line := lines[begin - 1].strip()) or line.startswith(
        "#"
    ):  # comments above the first statement
        begin -= 1
    return sum(bool(line.strip()) for line in lines[begin : function.end_lineno])


if __name__ == "__main__":
    sys.exit(main())
