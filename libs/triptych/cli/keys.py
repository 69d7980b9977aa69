"""Make API keys. A frontend asks for them where `frontend.api_keys_file` names a file.

triptych keys new alice --file keys.yaml                     adds an entry to the file and prints the key
triptych keys new search --tenant acme                       prints the key and the line for the file
triptych keys new gateway --tenant '*' --file keys.yaml      may speak for any tenant
triptych keys new operator --admin --file keys.yaml          opens the admin port, too
triptych keys new alerts --min-priority=-10 --file keys.yaml   may send requests that go before others
triptych keys new trial --requests-per-minute 60 --tokens-per-minute 100000 --file keys.yaml

A key is shown once: the file holds its SHA-256 only. A frontend that runs notices the change within a second.
Delete the line to take a key back. Clients send the key as `authorization: Bearer KEY` over gRPC and HTTP.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from triptych.config.api_keys import draw_key, entry_line, read_api_keys
from triptych.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key", description="Make a key.", allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="of its holder, for logs")
    new.add_argument(
        "--tenant", help="the tenant of its requests; * for any that they name (default: NAME)", metavar="T"
    )
    new.add_argument("--admin", action="store_true", default=None, help="let it open the admin port, too")
    for unit, text in (("requests", "requests to generate"), ("tokens", "tokens of prompts and outputs")):
        new.add_argument(
            f"--{unit}-per-minute",
            type=int,
            metavar="N",
            help=f"most {text} within a minute (default: any number)",
        )
    new.add_argument(
        "--min-priority",
        type=int,
        metavar="N",
        help="most urgent priority of its requests, less being more urgent (default: 0, or any with --tenant '*')",
    )
    new.add_argument("--file", type=Path, metavar="FILE", help="add the entry to this file")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError: the entry or the file is refused."""
    key = draw_key()
    names = ("tenant", "admin", "requests_per_minute", "tokens_per_minute", "min_priority")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    line = entry_line(arguments.name, key, **options)
    if arguments.file is None:
        print(f"key:  {key}\nline: {line}")
        return 0
    _append(arguments.file, arguments.name, line)
    print(key)
    return 0


def _append(file: Path, name: str, line: str) -> None:
    """Add a line to the file of keys, which is made readable to its owner only if there is none yet."""
    text = ""
    if file.exists():
        if any(key.name == name for key in read_api_keys(file)):
            raise ConfigError(
                f"API keys {file}: there is a key named {name!r}; delete its line, or use another name"
            )
        text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        line = "\n" + line
    try:
        file.touch(mode=0o600)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError as error:
        raise ConfigError(f"API keys {file}: {error.strerror or error}") from None
