"""Makes the reference pages of the site from the code: Python, options, errors, the command line, protos."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import triptych
from tools.docs.options import shown
from triptych.cli import build_parser
from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.config.option import Option
from triptych.rpc.status import TABLE

HELP_COLUMNS = "100"
PROTOS = ("v1", "admin/v1")
"""Folders of protos/triptych that are public."""


def pages(root: Path) -> dict[str, str]:
    """Return file name -> text of all pages."""
    return {
        "python.md": python(),
        "options.md": options(),
        "errors.md": errors(),
        "command-line.md": command_line(),
        "protos.md": protos(root / "protos" / "triptych"),
    }


def python() -> str:
    """Return a section for each public name of `triptych`, with its methods and fields."""
    classes = [getattr(triptych, name) for name in triptych.__all__]
    sections = [_class(cls) for cls in classes if inspect.isclass(cls)]
    return "# Python API\n\nThe public names of `triptych`.\n\n" + "\n\n".join(sections) + "\n"


def _class(cls: type) -> str:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    parts = [f"## {cls.__name__}", _docstring(body)]
    rows = list(_fields(cls, body))
    if rows:
        parts.append("\n".join(("| field | type | default | meaning |", "|---|---|---|---|", *rows)))
    for node in body.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_shown(node):
            parts.append(
                f"### {cls.__name__}.{node.name}\n\n```python\n{_signature(node)}\n```\n\n{_docstring(node)}"
            )
    return "\n\n".join(filter(None, parts))


def _is_shown(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    is_public = not node.name.startswith("_") or node.name == "__init__"
    return is_public and not is_overload and ast.get_docstring(node) is not None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a method as it is written, without its body, one argument a line where one line is too narrow."""
    head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{head} {node.name}({ast.unparse(node.args)}){returns}"
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return f"@property\n{line}"
    if len(line) <= int(HELP_COLUMNS):
        return line
    arguments = _arguments(node.args)
    return f"{head} {node.name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    def one(argument: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        text = stars + ast.unparse(argument)
        return f"{text} = {ast.unparse(default)}" if default is not None else text

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    yield from map(one, positional, defaults)
    if arguments.vararg:
        yield one(arguments.vararg, None, "*")
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(one, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield one(arguments.kwarg, None, "**")


def _fields(cls: type, body: ast.ClassDef) -> Iterator[str]:
    """Yield a row of name, type, default and meaning for each public field of a dataclass."""
    if not is_dataclass(cls):
        return
    texts = {
        node.target.id: str(after.value.value)
        for node, after in pairwise(body.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    for field in fields(cls):
        if not field.name.startswith("_"):
            default = "" if field.default is MISSING else _cell(repr(field.default))
            if field.default_factory is not MISSING:
                default = f"`{getattr(field.default_factory, '__name__', '')}()`"
            spec = field.metadata.get("spec")
            meaning = spec.help if spec is not None else texts.get(field.name, "")
            yield f"| `{field.name}` | {_cell(field.type)} | {default} | {_joined(meaning)} |"


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a docstring as Markdown: examples stay indented, and `Args:` and the like become lists."""
    lines: list[str] = []
    is_list = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Yields:"):
            lines += [f"**{line.removesuffix(':')}**", ""]
            is_list = True
        elif is_list and line.startswith("    "):
            lines.append(f"- {line.strip()}" if not line.startswith("     ") else f"  {line.strip()}")
        else:
            is_list = is_list and not line
            lines.append(line)
    return "\n".join(lines)


def options() -> str:
    """Return every option by section, as config/example.yaml has them."""
    parts = ["# Options", "Each may stand in a file (`--config`), in the environment, or be a flag."]
    for section in fields(EngineConfig):
        doc = inspect.getdoc(type(getattr(EngineConfig(), section.name))) or ""
        rows = [_option(option) for option in iter_options() if option.leaf == section.name]
        parts += [
            f"## {section.name}",
            doc,
            "\n".join(("| option | default | allowed | meaning |", "|---|---|---|---|", *rows)),
        ]
    return "\n\n".join(parts) + "\n"


def _option(option: Option) -> str:
    where = f"`{option.key}`<br>`{option.flag}`<br>`{option.env}`"
    readers = f" Read by {', '.join(option.limits.read_by)}."
    meaning = _joined(option.limits.help) + readers
    return f"| {where} | {shown(option.default)} | {option.limits.describe()} | {meaning} |"


def errors() -> str:
    """Return the table of errors: what each is in gRPC and over HTTP."""
    rows = [
        f"| `{row.error.code}` | {row.grpc_code.name} | {row.http_status} | `{row.openai_type}` "
        f"| {_joined(inspect.getdoc(row.error) or '').split('. ')[0].rstrip('.')} |"
        for row in TABLE
    ]
    head = ("| reason | gRPC | HTTP | type | meaning |", "|---|---|---|---|---|")
    intro = "The reason is `ErrorInfo.reason` over gRPC and, in lower case, `error.code` over HTTP."
    return "\n".join(("# Errors", "", intro, "", *head, *rows)) + "\n"


def command_line() -> str:
    """Return the help of `triptych` and of each of its commands."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_COLUMNS  # argparse reads it
    try:
        parts = ["# Command line", *_helps(build_parser(None), depth=2)]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n\n".join(parts) + "\n"


def _helps(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {parser.prog}\n\n```text\n{_without_options(parser.format_help().rstrip())}\n```"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from _helps(child, depth + 1)


def _without_options(text: str) -> str:
    """Return a help without the options of the configuration, which have a page of their own."""
    heads = tuple(f"{section.name}:\n" for section in fields(EngineConfig))
    blocks = text.split("\n\n")
    kept = [block for block in blocks if not block.startswith(heads)]
    return "\n\n".join(
        [*kept, "options of the configuration: see Options"] if len(kept) < len(blocks) else kept
    )


def protos(folder: Path) -> str:
    """Return the public protos as they are, their comments included."""
    parts = ["# Protos", "The public interface. `buf breaking` holds it to the last release."]
    for package in PROTOS:
        for file in sorted((folder / package).glob("*.proto")):
            parts.append(f"## {package}/{file.name}\n\n```protobuf\n{file.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _cell(text: Any) -> str:
    return f"`{_joined(str(text))}`" if text else ""


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
