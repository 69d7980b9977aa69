"""Writes a page of results from the JSON files of benchmarks that were run on one machine.

    python -m benchmarks.engine.core_step --json out/core_step.json
    python -m benchmarks.harness.results_page out/*.json        writes benchmarks/results/DATE-MACHINE.md

A page is written whole, so give it all files of the day. A page that was not written by this module is left alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.command import ROOT
from benchmarks.harness.figures import Figure
from benchmarks.harness.report import figures_table

RESULTS = ROOT / "benchmarks" / "results"
MARK = "<!-- Written by benchmarks.harness.results_page; do not edit. -->"
_VARIES = ("load_average",)
"""Facts of a machine that differ from run to run."""
_POSITIONAL = ("options",)
"""Arguments without a flag: options of the stack that is measured, as key=value."""
_NOISE = re.compile(r"\((?:R|TM)\)|\b(?:CPU|Processor|\d+-Core)\b|@.*", re.IGNORECASE)


def page(reports: Sequence[Mapping[str, Any]], date: str) -> str:
    """Return the page of reports as `Report.as_json` writes them.

    Raises:
        ValueError: They come from several machines.
    """
    machine = facts(reports[0])
    others = {report["benchmark"] for report in reports if facts(report) != machine}
    if others:
        raise ValueError(f"of another machine than {reports[0]['benchmark']}: {', '.join(sorted(others))}")
    load = max(report["machine"].get("load_average", 0.0) for report in reports)
    rows = "".join(f"| {name} | {_text(value)} |\n" for name, value in machine.items())
    sections = "\n".join(map(section, reports))
    return (
        f"# {date}, {machine['cpu']}\n\n{MARK}\n\n| machine | |\n|---|---|\n{rows}"
        f"| load average before, at most | {load} |\n\n{sections}"
    )


def section(report: Mapping[str, Any]) -> str:
    """Return one benchmark with the command that repeats it and the table that it printed."""
    figures = map(Figure.from_json, report["figures"])
    table = figures_table({figure.name: figure for figure in figures})
    return f"## {report['benchmark'].removeprefix('benchmarks.')}\n\n`{command(report)}`\n\n{table}\n"


def command(report: Mapping[str, Any]) -> str:
    """Return the command line of a report; options that are off, empty or say where figures go are left out."""
    arguments = dict(report["arguments"])
    words = ["python", "-m", report["benchmark"].removesuffix(".__main__")]
    words += (str(word) for name in _POSITIONAL for word in arguments.pop(name, ()))
    for name, value in arguments.items():
        if name == "json" or value is None or value is False or value == []:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is the same in all runs on a machine."""
    return {name: value for name, value in report["machine"].items() if name not in _VARIES}


def file_name(date: str, cpu: str) -> str:
    """Return DATE-MACHINE.md: 2026-11-21-amd-epyc-9b14.md."""
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", cpu).lower())
    return "-".join([date, *words]) + ".md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what --json FILE has written")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="(default: today)")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="(default: benchmarks/results)")
    arguments = parser.parse_args(argv)
    reports = [json.loads(file.read_text()) for file in arguments.files]
    target = arguments.folder / file_name(arguments.date, reports[0]["machine"]["cpu"])
    if target.exists() and MARK not in target.read_text():
        print(f"results: {target} was written by hand: choose another --folder or --date", file=sys.stderr)
        return 2
    try:
        text = page(reports, arguments.date)
    except ValueError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(target)
    return 0


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
