"""Compare ways to choose among several engines. All options are those of `python -m benchmarks.routing`.

It needs a checkout of the project, with the tools that `make setup-dev` installs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from triptych.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[4]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.prefix_chars = "\0"  # everything behind the command is the benchmark's, --help as well
    parser.add_argument("options", nargs="*")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark in the checkout.

    Raises:
        ConfigError: There is none.
    """
    if not (_ROOT / "benchmarks" / "routing").is_dir():
        raise ConfigError(f"bench routing: {_ROOT} is no checkout of Triptych: it has no benchmarks/routing")
    options = [option for option in arguments.options if option != "--"]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.routing", *options], cwd=_ROOT, check=False
    ).returncode
