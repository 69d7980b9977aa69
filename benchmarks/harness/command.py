"""The command line that all benchmarks share: rounds, JSON output, and an orderly end when it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.figures import Figure
from benchmarks.harness.machine import BUSY_LOAD, describe
from benchmarks.harness.report import Report, figures_table

ROOT = Path(__file__).resolve().parents[2]
STDOUT = Path("-")

Measure = Callable[[argparse.Namespace], Iterator[Figure]]
"""Yields each figure once per round, as it is measured."""


def create_parser(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        description: Docstring of the benchmark's module.
        rounds: Default of --rounds; None for a benchmark that chooses its rounds itself.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=_positive, default=rounds, metavar="N",
            help="medians are taken over them (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, nargs="?", const=STDOUT, metavar="FILE",
        help="write every sample to FILE after each figure, or print them instead of the table",
    )  # fmt: skip
    return parser


def run(
    parser: argparse.ArgumentParser,
    measure: Measure,
    argv: Sequence[str] | None = None,
    *,
    text: Callable[[Mapping[str, Figure]], str] = figures_table,
) -> int:
    """Measure, print the figures as a table, and return the exit status.

    Args:
        text: Writes the table from the figures by name.

    Returns:
        0, or 1 if a figure failed, or 130 if the user interrupted; what was measured by then is printed.
    """
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: children end with us
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), file=sys.stderr)
    if machine["load_average"] > BUSY_LOAD:
        print("other processes are computing: the figures will say little", file=sys.stderr)
    report = Report(_module_name(measure), machine, vars(arguments))
    is_whole = False
    with contextlib.suppress(KeyboardInterrupt):
        for figure in measure(arguments):
            report.add(figure)
            if arguments.json not in (None, STDOUT):
                report.write(arguments.json)
        is_whole = True
    print(report.as_json() if arguments.json == STDOUT else text(report.name_to_figure), flush=True)
    if arguments.json not in (None, STDOUT):
        print(f"every sample: {arguments.json}", file=sys.stderr)
    if not is_whole:
        print("interrupted: these are the figures so far", file=sys.stderr)
        return 130
    return 1 if report.num_failed else 0


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of this checkout, from its root, in this Python."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def _module_name(measure: Measure) -> str:
    main = sys.modules["__main__"].__spec__
    return main.name if main and measure.__module__ == "__main__" else measure.__module__


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is out of range: must be at least 1")
    return value
