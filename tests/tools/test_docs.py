"""Documentation: links, names of pages, widths, heads of decisions, what is made from the code, the site."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.docs import decisions, options, pages, reference, site
from triptych.config.loader import iter_options
from triptych.rpc import status

DOCS = "docs"
"""Apart, so that the pages of these tests are not looked for."""
HEAD = "**Status.** Accepted, 2026-11-24.\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("link", "error"),
    [
        ("[a](b.md)", None),
        ("[a](b.md#two-words-of-x_y)", None),
        ("[a](b.md#again-1)", None),
        ("[a](#here)", None),
        ("[a](https://example.org/none)", None),
        ("`[a](none.md)`", None),
        ("[a](none.md)", "guide/a.md:3: none.md: no such file"),
        ("[a](b.md#none)", "guide/a.md:3: b.md#none: no such heading"),
        ("[a](b.md#fenced)", "guide/a.md:3: b.md#fenced: no such heading"),
        ("[`a` b](b.md#again-2)", "guide/a.md:3: b.md#again-2: no such heading"),
    ],
)
def test_links(tmp_path: Path, link: str, error: str | None) -> None:
    write(
        tmp_path / "guide/b.md",
        "# B\n\n## Two words, of `x_y`\n\n## Again\n\n## Again\n\n```\n# fenced\n```\n",
    )
    write(tmp_path / "guide/a.md", f"# Here\n\n{link}\n")
    assert list(pages.broken_links(tmp_path, Path("guide/a.md"))) == ([error] if error else [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{DOCS}/adr/0002 has why", []),
        (f"see {DOCS}/wire.md.", []),
        (f"other/{DOCS}/none.md", []),
        (f"{DOCS}/adr/0003", [f"{DOCS}/adr/0003"]),
        (f"({DOCS}/none.md, {DOCS}/wire.md)", [f"{DOCS}/none.md"]),
    ],
)
def test_names_of_pages_in_sources(tmp_path: Path, text: str, named: list[str]) -> None:
    write(tmp_path / f"{DOCS}/adr/0002-words.md", "")
    write(tmp_path / f"{DOCS}/wire.md", "")
    write(tmp_path / "a.py", f"# {text}\n")
    found = list(pages.broken_mentions(tmp_path, Path("a.py")))
    assert found == [f"a.py:1: {name}: no such page" for name in named]


def test_commands(tmp_path: Path) -> None:
    write(tmp_path / "Makefile", ".PHONY: test test-all\n.PHONY: docs\ntest:\n")
    write(tmp_path / "benchmarks/engine/step.py", "")
    write(tmp_path / "tools/replay/__main__.py", "")
    lines = (
        "make test",
        "`make docs`, `make none`",
        "python -m benchmarks.engine.step --x",
        "`python -m tools.replay`",
    )
    write(
        tmp_path / "a.md", "\n".join((*lines, "python -m tools.none", "These make sense. python -m pytest\n"))
    )
    errors = ["a.md:2: make none: no such target", "a.md:5: python -m tools.none: no such module"]
    assert list(pages.broken_commands(tmp_path, Path("a.md"))) == errors


def test_paths_of_sources(tmp_path: Path) -> None:
    files = [Path("services/frontend/http/body.py"), Path("protos/v1/chat.proto")]
    write(tmp_path / "a.md", "`http/body.py` `v1/chat.proto` `services/worker/NAME.py`\n`frontend/body.py`\n")
    assert list(pages.broken_paths(tmp_path, Path("a.md"), files)) == [
        "a.md:2: frontend/body.py: no such file"
    ]


def test_wide_lines(tmp_path: Path) -> None:
    wide = "word " * 25
    page = (
        f"{wide}\n\n| {wide} |\n\n    {wide}\n\n```\n{wide}\n```\n\n[here](https://example.org/{'x' * 120})\n"
    )
    write(tmp_path / "a.md", page)
    assert list(pages.wide_lines(tmp_path, Path("a.md"))) == ["a.md:1: 125 columns of at most 110"]


def test_index_of_decisions(tmp_path: Path) -> None:
    write(tmp_path / "0001-one.md", "# 1. One thing\n\n**Status.** Superseded by 4, 2026-11-21.\n")
    write(tmp_path / "0004-four.md", f"# 4. Four things\n\n{HEAD}")
    found, errors = decisions.read(tmp_path)
    assert errors == []
    text = decisions.index(found)
    assert "| 1 | [One thing](0001-one.md) | Superseded by 4 | 2026-11-21 |" in text
    assert "| 4 | [Four things](0004-four.md) | Accepted | 2026-11-24 |" in text
    assert "Numbers that no record has: 2, 3." in text


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("7-x.md", f"# 7. X\n\n{HEAD}", "its name is not"),
        ("0007-x.md", f"# 8. X\n\n{HEAD}", "its first line is not `# 7. Sentence`"),
        ("0007-x.md", f"# 0007: X y\n\n{HEAD}", "its first line is not"),
        ("0007-x.md", "# 7. X y\n\nStatus: accepted.\n", "its second paragraph is not"),
        ("0007-x.md", "# 7. X y\n\n**Status.** Accepted.\n", "its second paragraph is not"),
    ],
)
def test_wrong_heads_of_decisions(tmp_path: Path, name: str, text: str, error: str) -> None:
    write(tmp_path / name, text)
    found, errors = decisions.read(tmp_path)
    assert found == []
    assert len(errors) == 1
    assert error in errors[0]


def test_two_decisions_of_one_number(tmp_path: Path) -> None:
    write(tmp_path / "0007-a.md", f"# 7. A thing\n\n{HEAD}")
    write(tmp_path / "0007-b.md", f"# 7. B thing\n\n{HEAD}")
    assert decisions.read(tmp_path)[1] == ["0007-b.md: 0007-a.md has the number 7, too"]


def test_tables_of_options() -> None:
    page = "# A\n\n<!-- options: frontend.port frontend.routing -->\nold\n<!-- end of options -->\n\nend\n"
    head, rows, end = options.filled(page).partition("| `frontend.port` | `50051` | gRPC port;")
    assert head.startswith("# A\n\n<!-- options: frontend.port frontend.routing -->\n| option | default |")
    assert "| `frontend.routing` | `prefix` | Which of several engines" in rows + end
    assert options.filled(options.filled(page)) == options.filled(page)
    assert "old" not in options.filled(page)


def test_table_of_an_option_that_there_is_not() -> None:
    with pytest.raises(KeyError, match=r"frontend\.none"):
        options.filled("<!-- options: frontend.none -->\n<!-- end of options -->")


@pytest.mark.parametrize(
    ("default", "text"), [("", ""), (True, "`true`"), (10.0, "`10`"), (0.25, "`0.25`"), (8192, "`8192`")]
)
def test_default_as_a_file_has_it(default: object, text: str) -> None:
    assert options.shown(default) == text


def test_links_of_the_site(tmp_path: Path) -> None:
    page = write(tmp_path / "guide/a.md", "")
    other = write(tmp_path / "guide/b.md", "")
    readme = write(tmp_path / "parts/README.md", "")
    write(tmp_path / "parts/code.py", "")
    text = "[b](b.md#x) [parts](../parts/) [code](../parts/code.py) [web](https://example.org)\n\n```\n[c](c.py)\n```\n"
    assert site.linked(text, page, {page, other, readme}) == (
        "[b](b.md#x) [parts](../parts/README.md) code [web](https://example.org)\n\n```\n[c](c.py)\n```\n"
    )


def test_folder_in_the_menu_of_the_site(tmp_path: Path) -> None:
    write(tmp_path / site.CONFIG, "nav:\n  - One:\n      - guide/README.md\n      - guide/\n")
    for name in ("b.md", "a.md", "README.md"):
        write(tmp_path / site.SOURCE / "guide" / name, "")
    expected = "nav:\n  - One:\n      - guide/README.md\n      - guide/a.md\n      - guide/b.md\n"
    assert site.navigation(tmp_path) == expected


def test_reference_of_python() -> None:
    text = reference.python()
    assert "### AsyncLLM.generate\n\n```python\nasync def generate(" in text
    assert "| `top_p` | `float` | `1.0` | Keep the fewest best tokens" in text
    assert "| `finish_reason` | `str \\| None` | `None` |" in text
    assert "_Stack" not in text


def test_reference_of_errors_has_each_error() -> None:
    rows = reference.errors().splitlines()
    assert sum(row.startswith("| `") for row in rows) == len(status.TABLE)
    (row,) = [row for row in rows if "`CONTEXT_LENGTH_EXCEEDED`" in row]
    assert "| INVALID_ARGUMENT | 400 |" in row


def test_reference_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = reference.command_line()
    assert os.environ["COLUMNS"] == "40"
    serve = text[text.index("### triptych serve") : text.index("### triptych chat")]
    assert "--config FILE" in serve
    assert "options of the configuration: see Options" in serve
    assert "--scheduler.max-num-waiting" not in serve
    assert "#### triptych admin drain" in text


def test_reference_of_options_has_each_option() -> None:
    text = reference.options()
    keys = [option.key for option in iter_options()]
    assert [key for key in keys if f"| `{key}`<br>`--" not in text] == []
