"""Fills the tables of options in pages from the declarations that config/example.yaml is written from.

A page says which options it wants, and the lines between the two comments are written by `make fix-docs`:

    <!-- options: frontend.port frontend.http_port -->
    <!-- end of options -->
"""

from __future__ import annotations

import re
from typing import Any

from triptych.config.loader import iter_options
from triptych.config.option import Option

TABLE = re.compile(r"<!-- options: (?P<keys>[^>]*?) -->\n.*?<!-- end of options -->", re.DOTALL)


def filled(page: str) -> str:
    """Return the page with its tables as the declarations are.

    Raises:
        KeyError: It asks for an option that there is not.
    """
    options = {option.key: option for option in iter_options()}

    def table(match: re.Match[str]) -> str:
        rows = "".join(f"{row(options[key])}\n" for key in match["keys"].split())
        head = "| option | default | meaning |\n|---|---|---|\n"
        return f"<!-- options: {match['keys']} -->\n{head}{rows}<!-- end of options -->"

    return TABLE.sub(table, page)


def row(option: Option) -> str:
    return f"| `{option.key}` | {shown(option.default)} | {option.limits.help.replace('|', chr(92) + '|')} |"


def shown(default: Any) -> str:
    """Return a default as a config file has it, or nothing where it is empty."""
    if default == "":
        return ""
    if isinstance(default, bool):
        return "`true`" if default else "`false`"
    return f"`{default:.15g}`" if isinstance(default, float) else f"`{default}`"
