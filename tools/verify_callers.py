"""Finds functions, methods, classes and constants that nothing uses but their own tests.

A name is used if a source outside the tests reads it anywhere but in its own definition, or has it in a string: it
may be looked up there by name. Names are compared without their modules, so a name that is used somewhere hides one
that is equal to it; what is found is unused for certain.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.ratchets import hold  # noqa: E402 - run as a script

ALLOWED = {
    "*.aclose": "called by contextlib.aclosing",
    "services/frontend/grpc/long_calls.py:_LongRequests.*": "called by generated code",
    "services/worker/models/registry.py:register_model": "called by packages with models of their own",
    "tools/tune/compiling.py:_Driver.*": "called by Triton",
    "kernels/triptych_kernels/cpu/compile.py:build_*": "builds for tests of what this machine cannot run",
    "libs/triptych/client/*:*": "the public Python API",
    "libs/triptych/vllm/*:*": "the names of vLLM's Python API",
    "libs/triptych/types/outputs.py:*": "what the public Python API returns",
}
"""File and name to the reason why nothing of ours need use it."""
OWN_PACKAGES = {"triptych", "triptych_kernels", "triptych_services", "benchmarks", "tools"}
PLAIN_DECORATORS = {
    *("property", "cached_property", "staticmethod", "classmethod", "abstractmethod", "override", "overload"),
    *(
        "dataclass",
        "runtime_checkable",
        "contextmanager",
        "asynccontextmanager",
        "cache",
        "lru_cache",
        "wraps",
        "jit",
    ),
}
"""Decorators that only change a definition; any other may pass it to a caller."""
_WORD = re.compile(r"[A-Za-z_]\w*")


class Definition(NamedTuple):
    """A name that a source defines."""

    name: str
    place: str
    """File and qualified name."""
    line: int
    num_own_uses: int
    """Uses of the name inside its definition."""


def main() -> int:
    """Print the names that nothing uses; return 1 if there are more than there may be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in filter(None, listing.split("\0"))]
    sources = {
        path.as_posix(): (ROOT / path).read_text()
        for path in paths
        if path.suffix == ".py"
        and path.parts[0] not in ("tests", "examples")
        and not path.stem.endswith(("_pb2", "_pb2_grpc"))
        and (ROOT / path).is_file()
    }
    others = [(ROOT / name).read_text() for name in ("pyproject.toml", "Makefile")]
    held = hold("names that nothing but their tests uses", list(unused(sources, others)))
    return 0 if held else 1


def unused(sources: dict[str, str], others: Iterable[str] = ()) -> Iterator[str]:
    """Yield the place of each definition in the sources that nothing uses.

    Args:
        sources: Path to text of the Python files.
        others: Further texts of which every word is a use.
    """
    uses = Counter(word for text in others for word in _WORD.findall(text))
    definitions: list[Definition] = []
    for path, text in sources.items():
        tree = ast.parse(text)
        uses.update(names_used(tree))
        definitions += definitions_in(tree, path)
    for definition in definitions:
        if uses[definition.name] <= definition.num_own_uses and not is_allowed(definition.place):
            yield f"{definition.place.replace(':', f':{definition.line}: ')}"


def names_used(tree: ast.AST) -> Counter[str]:
    """Count the names that a piece of source reads, those in its strings included and its docstrings excluded."""
    uses: Counter[str] = Counter()
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                uses[name] += 1
            case ast.Attribute(attr=name, ctx=ast.Load()):
                uses[name] += 1
            case ast.keyword(arg=str(name)):
                uses[name] += 1
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                uses.update(_WORD.findall(text))
            case _:
                pass
    return uses


def definitions_in(tree: ast.Module, path: str) -> Iterator[Definition]:
    """Yield the definitions of a file: functions, classes, their methods, and constants of the file."""
    foreign = _foreign_names(tree)

    def walk(body: Iterable[ast.stmt], outer: str, is_override: bool) -> Iterator[Definition]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                place = f"{path}:{outer}{node.name}"
                if not (_is_dunder(node.name) or is_override or _is_registered(node)):
                    yield Definition(node.name, place, node.lineno, names_used(node)[node.name])
                if isinstance(node, ast.ClassDef):
                    is_derived = any(_root_of(base) in foreign for base in node.bases)
                    yield from walk(node.body, f"{outer}{node.name}.", is_derived)
            elif isinstance(node, ast.If | ast.Try):
                yield from walk(node.body, outer, is_override)
            elif not outer and isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and not _is_dunder(target.id):
                        yield Definition(target.id, f"{path}:{target.id}", node.lineno, 0)

    return walk(tree.body, "", False)


def is_allowed(place: str) -> bool:
    """Return whether a definition need not be used."""
    return any(fnmatch.fnmatchcase(place, pattern) for pattern in ALLOWED)


def _is_dunder(name: str) -> bool:
    return name == "_" or (name.startswith("__") and name.endswith("__"))


def _is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether a decorator may hand the definition to a caller: any but those that only change it."""

    def name_of(decorator: ast.expr) -> str:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        return (
            called.attr
            if isinstance(called, ast.Attribute)
            else called.id
            if isinstance(called, ast.Name)
            else ""
        )

    return any(name_of(decorator) not in PLAIN_DECORATORS for decorator in node.decorator_list)


def _foreign_names(tree: ast.Module) -> set[str]:
    """Return the names of a file that may be bases from packages of others, which may call their methods."""
    plain = {"abc", "dataclasses", "enum", "typing"}
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for module in [node.module if isinstance(node, ast.ImportFrom) and node.module else alias.name]
        if alias.name.endswith("_pb2_grpc") or module.split(".")[0] not in OWN_PACKAGES | plain
    }


def _root_of(base: ast.expr) -> str:
    """Return the first name of an expression such as `torch.nn.Module` or `Protocol[int]`."""
    while isinstance(base, ast.Attribute | ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
