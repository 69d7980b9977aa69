"""Holds hand-written sources outside the tests within limits: files, functions, classes and constructors.

| what        | limit                                                                                              |
|-------------|----------------------------------------------------------------------------------------------------|
| file        | 600 lines; those above 400 are named; tables and protos may be longer                              |
| function    | 60 lines, counted whole: signature, docstring, comments, inner functions; three are exempt by name |
| class       | 20 public methods and properties                                                                   |
| constructor | 10 arguments of `__init__` besides `self`; a dataclass is a table of fields and may have more      |
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.ratchets import hold  # noqa: E402 - run as a script

WARN_LINES = 400
"""Above it a file is named: it may have grown a second reason to change."""
LIMIT_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 20
MAX_CONSTRUCTOR_ARGUMENTS = 10
SUFFIXES = (".py", ".cpp", ".h", ".proto")
TABLES = {
    Path(name)
    for name in (
        "libs/triptych/types/sampling.py",
        "libs/triptych/config/process_fields.py",
    )
}
"""Files of rows only, which one reads by looking a row up."""

LONG_FUNCTIONS = {
    ("kernels/triptych_kernels/triton/attention/tile.py", "attend_keys"),
    ("kernels/triptych_kernels/triton/attention/prefill.py", "_attend_part"),
    ("kernels/triptych_kernels/triton/sampling/select.py", "find_threshold"),
}
"""Device code through which a state in registers is passed: a part of it would take all of the state and return it.
There are three at most, and each is measured on a device when it is changed."""


def main() -> int:
    """Print the long files, and what is above a limit; return 1 if more is than may be."""
    texts = {path: (ROOT / path).read_text() for path in sources()}
    num_lines = {
        path: len(text.splitlines())
        for path, text in texts.items()
        if path.suffix != ".proto" and path not in TABLES
    }
    for path, count in sorted(num_lines.items(), key=lambda item: item[1], reverse=True):
        if count > WARN_LINES:
            print(f"{count:5} {path}")
    long_files = [f"{path}: {count} lines" for path, count in num_lines.items() if count > LIMIT_LINES]
    functions, classes, constructors = [], [], []
    for path, text in texts.items():
        if path.suffix == ".py":
            tree = ast.parse(text)
            allowed = {name for file, name in LONG_FUNCTIONS if file == path.as_posix()}
            functions += [f"{path}:{problem}" for problem in long_functions(tree, allowed)]
            classes += [f"{path}:{problem}" for problem in wide_classes(tree)]
            constructors += [f"{path}:{problem}" for problem in wide_constructors(tree)]
    held = [
        hold("files above 600 lines", long_files),
        hold("functions above 60 lines", functions),
        hold("classes with more than 20 public methods", classes),
        hold("constructors with more than 10 arguments", constructors),
    ]
    return 0 if all(held) else 1


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
        and not path.is_relative_to("protos/triptych/compat")  # copied as it is
        and (ROOT / path).is_file()
    ]


def long_functions(tree: ast.Module, allowed: Collection[str] = ()) -> Iterator[str]:
    """Yield the line, name and size of each function above the limit that is not allowed by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in allowed:
            assert node.end_lineno is not None
            if (num_lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {num_lines} lines"


def wide_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the line, name and size of each class above the limit. A property with a setter counts once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = {
                each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            num_public = sum(not name.startswith("_") for name in names)
            if num_public > MAX_PUBLIC_METHODS:
                yield f"{node.lineno}: {node.name} has {num_public} public methods"


def wide_constructors(tree: ast.Module) -> Iterator[str]:
    """Yield the line and size of each constructor above the limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            num_arguments = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            if num_arguments > MAX_CONSTRUCTOR_ARGUMENTS:
                yield f"{node.lineno}: __init__ has {num_arguments} arguments"


if __name__ == "__main__":
    sys.exit(main())
