"""Sizes of sources against their limits."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from textwrap import indent

import pytest

from tools import ratchets, verify_sizes
from tools.ratchets import Limit
from tools.verify_sizes import (
    LONG_FUNCTIONS,
    MAX_CONSTRUCTOR_ARGUMENTS,
    MAX_FUNCTION_LINES,
    MAX_PUBLIC_METHODS,
    long_functions,
    wide_classes,
    wide_constructors,
)


@pytest.fixture(autouse=True)
def no_findings_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratchets, "LIMITS", {name: Limit(0, 0) for name in ratchets.LIMITS})


def function(num_lines: int, *, prefix: str = "def", name: str = "f") -> str:
    """Return a function of so many lines with signature, docstring, blank lines and comments."""
    head = [f"{prefix} {name}(", "    a,", "):", '    """Do it."""', "", "    # so"]
    return "\n".join([*head, *["    x = 1"] * (num_lines - len(head))]) + "\n"


@pytest.mark.parametrize("prefix", ["def", "async def"])
def test_function_above_limit(prefix: str) -> None:
    at_limit = function(MAX_FUNCTION_LINES, prefix=prefix)
    assert list(long_functions(ast.parse(at_limit))) == []
    above = "import os\n\n@decorated\n" + function(MAX_FUNCTION_LINES + 1, prefix=prefix)
    assert list(long_functions(ast.parse(above))) == ["4: f has 61 lines"]


def test_exceptions_are_few_and_real() -> None:
    assert len(LONG_FUNCTIONS) <= 3
    for path, name in LONG_FUNCTIONS:
        tree = ast.parse((verify_sizes.ROOT / path).read_text())
        (found,) = (place for place in long_functions(tree) if f" {name} has" in place)
        assert found not in list(long_functions(tree, {name}))


def test_inner_function_counts_in_outer_one() -> None:
    outer = "def outer():\n" + indent(function(MAX_FUNCTION_LINES - 2, name="inner"), "    ")
    assert list(long_functions(ast.parse(outer + "    return inner\n"))) == []
    above = outer + "    inner()\n    return inner\n"
    assert list(long_functions(ast.parse(above))) == ["1: outer has 61 lines"]


def test_class_above_limit() -> None:
    def a_class(num_public: int) -> str:
        public = [f"    def m{number}(self): ..." for number in range(num_public - 1)]
        hidden = [f"    def _m{number}(self): ..." for number in range(30)]
        both = "    @property\n    def p(self): ...\n    @p.setter\n    def p(self, value): ..."
        return "\n".join(["class A:", *public, *hidden, both]) + "\n"

    assert list(wide_classes(ast.parse(a_class(MAX_PUBLIC_METHODS)))) == []
    assert list(wide_classes(ast.parse(a_class(MAX_PUBLIC_METHODS + 1)))) == ["1: A has 21 public methods"]


def test_constructor_above_limit() -> None:
    def a_class(num_positional: int, num_named: int, method: str = "__init__") -> ast.Module:
        positional = [f"p{number}" for number in range(num_positional)]
        named = [f"n{number}=0" for number in range(num_named)]
        arguments = ", ".join(["self", *positional, "*", *named])
        return ast.parse(f"class A:\n    def {method}({arguments}):\n        pass\n")

    assert list(wide_constructors(a_class(4, MAX_CONSTRUCTOR_ARGUMENTS - 4))) == []
    assert list(wide_constructors(a_class(4, MAX_CONSTRUCTOR_ARGUMENTS - 3))) == [
        "2: __init__ has 11 arguments"
    ]
    assert list(wide_constructors(a_class(4, 20, method="create"))) == []


def test_main_names_what_is_above_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_sizes, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for folder in ("tests", "protos", "libs/triptych/types"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests" / "test_long.py").write_text("x = 1\n" * 1000)
    (tmp_path / "protos" / "a.proto").write_text("// a\n" * 1000)
    (tmp_path / "libs/triptych/types/sampling.py").write_text("x = 1\n" * 1000)  # a table
    (tmp_path / "a.h").write_text("int x;\n" * 401)
    assert verify_sizes.main() == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == ("  401 a.h", "")

    (tmp_path / "b.cpp").write_text("int x;\n" * 601)
    (tmp_path / "c.py").write_text(function(61))
    assert verify_sizes.main() == 1
    assert capsys.readouterr().err.splitlines() == [
        "b.cpp: 601 lines",
        "files above 600 lines: 1, allowed are 0",
        "c.py:1: f has 61 lines",
        "functions above 60 lines: 1, allowed are 0",
    ]
