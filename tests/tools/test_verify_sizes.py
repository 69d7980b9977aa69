"""Sizes of sources against their limits."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import indent

import pytest

from tools import verify_sizes
from tools.verify_sizes import MAX_CONSTRUCTOR_ARGUMENTS, MAX_FUNCTION_LINES, oversized_functions


def function(num_lines: int, *, prefix: str = "def", docstring: str = "", name: str = "f") -> str:
    """Return a function whose body has so many lines, half of them comments, between blank lines."""
    body = ["x = 1" if number % 2 else "# one" for number in range(num_lines - 1)] + ["return x"]
    return f"{prefix} {name}(\n    a,\n    b,\n):\n" + indent(docstring + "\n\n".join(body), "    ") + "\n"


@pytest.mark.parametrize("prefix", ["def", "async def"])
def test_function_above_limit(prefix: str) -> None:
    assert list(oversized_functions(function(MAX_FUNCTION_LINES, prefix=prefix))) == []
    (problem,) = oversized_functions("import os\n" + function(MAX_FUNCTION_LINES + 1, prefix=prefix))
    assert problem == "2: f has 61 lines, the limit is 60"


def test_docstring_is_not_counted() -> None:
    docstring = '"""Do it.\n\n' + "line\n" * 50 + '"""\n'
    assert list(oversized_functions(function(MAX_FUNCTION_LINES, docstring=docstring))) == []
    assert len(list(oversized_functions(function(MAX_FUNCTION_LINES + 1, docstring=docstring)))) == 1


def test_inner_function_counts_in_outer_one() -> None:
    inner = function(MAX_FUNCTION_LINES - 5, name="inner")  # and 4 lines of signature
    outer = "def outer():\n" + indent(inner, "    ")
    assert list(oversized_functions(outer + "    return inner\n")) == []
    (problem,) = oversized_functions(outer + "    inner()\n    return inner\n")
    assert problem == "1: outer has 61 lines, the limit is 60"


def test_constructor_above_limit() -> None:
    def a_class(num_positional: int, num_named: int, method: str = "__init__") -> str:
        positional = [f"p{number}" for number in range(num_positional)]
        named = [f"n{number}=0" for number in range(num_named)]
        return f"class A:\n    def {method}({', '.join(['self', *positional, '*', *named])}):\n        pass\n"

    assert list(oversized_functions(a_class(4, MAX_CONSTRUCTOR_ARGUMENTS - 4))) == []
    (problem,) = oversized_functions(a_class(4, MAX_CONSTRUCTOR_ARGUMENTS - 3))
    assert problem == "2: __init__ has 11 arguments, the limit is 10"
    assert list(oversized_functions(a_class(4, 20, method="create"))) == []


def test_main_names_what_is_above_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_sizes, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_long.py").write_text("x = 1\n" * 1000)
    (tmp_path / "a.h").write_text("int x;\n" * 401)
    assert verify_sizes.main() == 0
    assert capsys.readouterr() == ("  401 a.h\n", "")

    (tmp_path / "b.cpp").write_text("int x;\n" * 601)
    (tmp_path / "c.py").write_text(function(61))
    assert verify_sizes.main() == 1
    names = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert names == ["b.cpp", "c.py:1:"]
