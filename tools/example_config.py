"""Writes config/example.yaml from the declared options; `make fix-config`, `make verify-config`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import yaml

from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.config.option import Option

EXAMPLE = Path(__file__).resolve().parent.parent / "config" / "example.yaml"
WIDTH = 110
HEAD = """\
# Every option of Triptych at its default. This file itself is a valid config: copy it and keep what differs.
#
#   triptych serve --config FILE        or TRIPTYCH_CONFIG=FILE, for every process
#
# Sources, each overriding the one before: the defaults, this file, the environment, flags. The option
# `max_num_seqs` of the section `scheduler` is TRIPTYCH_SCHEDULER_MAX_NUM_SEQS and --scheduler.max-num-seqs.
#
# Written by `make fix-config` from libs/triptych/config/fields.py; do not edit.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    if parser.parse_args().check:
        if EXAMPLE.is_file() and EXAMPLE.read_text() == render():
            return 0
        print(
            "verify-config: config/example.yaml is not what the code says; run make fix-config",
            file=sys.stderr,
        )
        return 1
    EXAMPLE.write_text(render())
    return 0


def render() -> str:
    """The text of config/example.yaml."""
    docstrings = {
        leaf.name: (type(getattr(EngineConfig(), leaf.name)).__doc__) for leaf in fields(EngineConfig)
    }
    lines = [HEAD.rstrip()]
    leaf = ""
    for option in iter_options():
        if option.leaf != leaf:
            leaf = option.leaf
            lines += ["", f"# {docstrings[leaf]}", f"{leaf}:"]
        lines += [f"  {line}" for line in option_lines(option)]
    return "\n".join(lines) + "\n"


def option_lines(option: Option) -> Iterator[str]:
    allowed = option.limits.describe()
    readers = f"Read by {', '.join(option.limits.read_by)}."
    facts = [f"{allowed[0].upper()}{allowed[1:]}."] if allowed else []
    if option.limits.shared:
        facts.append("The engine and its worker must have the same value.")
    if option.limits.per_rank:
        facts.append("May differ between the ranks of a group.")
    for paragraph in (option.limits.help, " ".join([*facts, readers])):
        for line in textwrap.wrap(paragraph, WIDTH - 4):
            yield f"# {line}"
    yield yaml.safe_dump({option.name: option.default}, default_flow_style=False, width=WIDTH).rstrip()


if __name__ == "__main__":
    sys.exit(main())
