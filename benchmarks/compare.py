"""Runs one benchmark in this checkout and in another one, in turn, and prints the ratio of each figure.

    python -m benchmarks.compare --base DIR engine.core_step [options of that benchmark]

Each round runs the benchmark once in each checkout, as a process of its own, so that a machine that drifts hits both
alike. Options are passed on; give the benchmark `--rounds 1` to keep the turns short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.command import ROOT, module_command
from benchmarks.harness.figures import Figure, number
from benchmarks.harness.report import Report, table


def run_once(checkout: Path, benchmark: str, options: list[str]) -> list[Figure]:
    """Run the benchmark of a checkout and return its figures.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    path = os.pathsep.join(str(checkout / root) for root in ("libs", "kernels", "."))
    command = module_command(f"benchmarks.{benchmark}", *options, "--json")
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return [Figure.from_json(values) for values in json.loads(done.stdout)["figures"]]


def comparison(base: Mapping[str, Figure], here: Mapping[str, Figure]) -> str:
    """Return a table of the figures that both checkouts have."""

    def cell(figure: Figure) -> str:
        spread = f" ({number(min(figure.samples))} to {number(max(figure.samples))})"
        return f"{number(figure.median)} {figure.unit}{spread}"

    both = [name for name in base if name in here and base[name].samples and here[name].samples]
    head = ("figure", "base", "here", "here / base")
    body = []
    for name in both:
        ratio = f"{here[name].median / base[name].median:.3f}" if base[name].median else "-"
        body.append((name, cell(base[name]), cell(here[name]), ratio))
    return table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of both (default: 3)")
    parser.add_argument("benchmark", help="as engine.core_step")
    arguments, options = parser.parse_known_args()
    base, here = Report("", {}, {}), Report("", {}, {})
    for turn in range(arguments.turns):
        for checkout, report in ((arguments.base.resolve(), base), (ROOT, here)):
            print(f"turn {turn + 1}: {checkout}", file=sys.stderr)
            for figure in run_once(checkout, arguments.benchmark, options):
                report.add(figure)
    print(comparison(base.name_to_figure, here.name_to_figure))


if __name__ == "__main__":
    main()
