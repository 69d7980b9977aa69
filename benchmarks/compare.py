"""Runs the same benchmarks in this checkout and at another commit, in turn, and prints the ratio of each figure.

    python -m benchmarks.compare --base 64b30f9                            all of the suite, 3 rounds
    python -m benchmarks.compare --base 64b30f9 --minutes 20 --rounds 9    as many rounds as fit
    python -m benchmarks.compare --base DIR core_step frontend_load        these, with a checkout that is there
    python -m benchmarks.compare --base DIR --run "stack.start --rounds 1"

Each checkout runs its own copy of a benchmark, as a process of its own, and figures are matched by name. Faults are
played by this checkout, on the services of either. A round runs each
benchmark once per checkout, and which of the two goes first changes from round to round, so that a machine that drifts
slows both alike. A ratio is taken within each round; the table shows the median of the ratios and their spread.
A figure is `worse` if its median ratio is more than 3% to the bad side, and if every round, of at least three, was on
that side. By chance alone that happens to one of 2^rounds figures that the noise moves by more than 3%.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.command import ROOT, module_command
from benchmarks.harness.figures import Figure, number
from benchmarks.harness.machine import describe
from benchmarks.harness.process_tree import descendants, kill_all, session_members
from benchmarks.harness.report import table

TOLERANCE = 0.03
_MIN_ROUNDS = 3
TIMEOUT_S = 600.0
_CHECKOUTS = ROOT / "build" / "compare"
_KERNELS = "kernels/triptych_kernels/cpu"
_MORE_IS_BETTER, _LESS_IS_BETTER = ("/s",), ("s", "ms", "us", "ns", "steps", "calls")
_THROUGHPUT = "triptych.cli bench throughput --rounds 1 --json --input-len 128 --output-len 128"

SUITE = {
    "calls": "tests.calls.count",
    "core_step": "benchmarks.engine.core_step --rounds 1 --json",
    "core_arrivals": "benchmarks.engine.core_arrivals --rounds 7 --json",
    "step_round_trip": "benchmarks.worker.step_round_trip --rounds 1 --json",
    "frontend_load": "benchmarks.stack.frontend_load --rounds 1 --json",
    "frontend_requests": "benchmarks.stack.frontend_load --rounds 1 --json --output-len 1 --requests 30",
    "worker_killed": "benchmarks.stack.faults worker_killed --kills 2 --json --build {checkout}",
    "failover": "benchmarks.stack.faults failover --kills 4 --json --build {checkout}",
    "streams_1": f"{_THROUGHPUT} --num-prompts 2 --concurrency 1",
    "streams_8": f"{_THROUGHPUT} --num-prompts 8 --concurrency 8",
    "streams_64": f"{_THROUGHPUT} --num-prompts 64 --concurrency 64",
}
"""Name -> module and options. With {checkout} this checkout's benchmark runs, and measures the services of that one."""


class RunError(Exception):
    """A benchmark failed in a checkout; the message says how."""


@dataclass(slots=True)
class Pairs:
    """The figures of one benchmark, from the rounds in which both checkouts ran it."""

    base: dict[str, list[Figure]] = field(default_factory=dict)
    here: dict[str, list[Figure]] = field(default_factory=dict)

    def add(self, base: Sequence[Figure], here: Sequence[Figure]) -> None:
        """Take in one round."""
        others = {figure.name: figure for figure in here if figure.samples}
        for figure in base:
            if figure.samples and figure.name in others:
                self.base.setdefault(figure.name, []).append(figure)
                self.here.setdefault(figure.name, []).append(others[figure.name])

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a line of the table for each figure."""
        for name, base in self.base.items():
            here = self.here[name]
            found = [new.median / old.median for old, new in zip(base, here, strict=True) if old.median]
            ratio = spread = ""
            if found:
                ratio, spread = f"{statistics.median(found):.3f}", f"{min(found):.3f} to {max(found):.3f}"
            yield name, _cell(base), _cell(here), ratio, spread, verdict(base[0].unit, found)


def verdict(unit: str, ratios: Sequence[float]) -> str:
    """Return `worse` or `better` if the ratios are beyond the tolerance and all on one side of 1; else nothing.

    Args:
        ratios: This checkout's figure divided by the base's, for each round.
    """
    if unit.endswith(_MORE_IS_BETTER):
        costs = [1 / ratio if ratio else float("inf") for ratio in ratios]
    elif unit in _LESS_IS_BETTER:
        costs = list(ratios)
    else:
        return ""
    if len(costs) < _MIN_ROUNDS or abs(statistics.median(costs) - 1) <= TOLERANCE:
        return ""
    if min(costs) > 1:
        return "worse"
    return "better" if max(costs) < 1 else ""


def checkout_of(base: str, *, same_kernels: bool) -> Path:
    """Return the folder of a checkout, or that of a commit, which is unpacked under build/compare.

    Raises:
        subprocess.CalledProcessError: There is no such commit, or its kernels do not compile.
    """
    if (Path(base) / "benchmarks").is_dir():
        return Path(base).resolve()
    command = ["git", "rev-parse", "--verify", "--short=12", f"{base}^{{commit}}"]
    commit = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    folder = _CHECKOUTS / commit
    if not folder.is_dir():
        draft = folder.with_name(f"{commit}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
        ).stdout
        subprocess.run(["tar", "-x"], cwd=draft, input=archive, check=True)
        if same_kernels or _has_same_kernels(commit):
            if (ROOT / _KERNELS / "lib").is_dir():
                shutil.copytree(ROOT / _KERNELS / "lib", draft / _KERNELS / "lib")
        else:
            build = module_command("triptych_kernels.cpu.build")
            subprocess.run(build, cwd=draft, env=_environment(draft), stdout=sys.stderr, check=True)
        draft.rename(folder)
    return folder


def _has_same_kernels(commit: str) -> bool:
    command = ["git", "diff", "--quiet", commit, "--", f"{_KERNELS}/src"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def run_once(checkout: Path, command: str) -> list[Figure]:
    """Run a benchmark in a checkout, and end all that it has started.

    Raises:
        RunError: It failed, or took too long.
    """
    home = ROOT if "{checkout}" in command else checkout
    module, *options = (word.format(checkout=checkout) for word in command.split())
    with subprocess.Popen(
        module_command(module, *options), cwd=home, env=_environment(home),
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"no end after {TIMEOUT_S:.0f} s: {command}") from None
        finally:
            kill_all({*descendants([process.pid]), *session_members(process.pid)}, timeout_s=10.0)
    if process.returncode:
        raise RunError(f"{command} ended with {process.returncode}: {errors[-600:].strip()}")
    return figures_of(output)


def figures_of(output: str) -> list[Figure]:
    """Return the figures that a benchmark, `triptych bench throughput` or tests.calls.count has printed."""
    if output.lstrip().startswith("{"):
        values: dict[str, Any] = json.loads(output)
        if "figures" in values:
            return [Figure.from_json(figure) for figure in values["figures"]]
        units = {"_s": "s", "_ms": "ms", "_per_s": "tok/s"}  # the last that fits
        named = ((name, unit) for name in values for end, unit in units.items() if name.endswith(end))
        return [Figure(name, unit, (values[name],)) for name, unit in dict(named).items() if values[name]]
    lines = (line.partition(":") for line in output.splitlines() if "Python calls" in line)
    return [Figure(name, "calls", (float(rest.split()[0]),)) for name, _, rest in lines]


def main() -> int:
    arguments = _parser().parse_args()
    commands = {name: SUITE[name] for name in arguments.names or (SUITE if not arguments.run else ())}
    commands |= {line: f"benchmarks.{line} --json" for line in arguments.run}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    base = checkout_of(arguments.base, same_kernels=arguments.same_kernels)
    print(", ".join(f"{name} {value}" for name, value in describe().items()), flush=True)
    pairs = {name: Pairs() for name in commands}
    failures: list[str] = []
    started_s = time.monotonic()
    num_rounds = 0
    try:
        while num_rounds < arguments.rounds:
            round_s = (time.monotonic() - started_s) / num_rounds if num_rounds else 0.0
            if arguments.minutes and time.monotonic() - started_s + round_s > 60 * arguments.minutes:
                break
            for name, command in commands.items():
                try:
                    _run_pair(base, command, pairs[name], is_swapped=bool(num_rounds % 2))
                except RunError as error:
                    failures.append(f"{name}, round {num_rounds + 1}: {error}")
                    print(f"FAILED {failures[-1]}", flush=True)
                minutes = (time.monotonic() - started_s) / 60
                print(f"\nafter {minutes:.1f} minutes: {name}, rounds: {num_rounds + 1}", flush=True)
                print(_table(pairs[name].rows()), flush=True)
            num_rounds += 1
    except KeyboardInterrupt:
        print("\ninterrupted: these are the figures so far")
    return _conclude(arguments.base, pairs, failures, arguments.markdown)


def _run_pair(base: Path, command: str, pairs: Pairs, *, is_swapped: bool) -> None:
    checkouts = (ROOT, base) if is_swapped else (base, ROOT)
    found = {checkout: run_once(checkout, command) for checkout in checkouts}
    pairs.add(found[base], found[ROOT])


def _conclude(base: str, pairs: dict[str, Pairs], failures: list[str], markdown: Path | None) -> int:
    """Print and write the whole table, and return 1 if a figure is worse or a run failed."""
    rows = [(name, *row) for name, one in pairs.items() for row in one.rows()]
    text = f"base: {base}\n\n{_table(rows, 'benchmark')}\n"
    worse = [f"{name}: {figure}" for name, figure, *_, said in rows if said == "worse"]
    text += f"\nworse by more than {TOLERANCE:.0%} in every round: {'; '.join(worse) or 'none'}\n"
    text += "".join(f"FAILED {failure}\n" for failure in failures)
    print(f"\n{text}", flush=True)
    if markdown is not None:
        markdown.write_text(text)
    return 1 if worse or failures else 0


def _table(rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]], *more: str) -> str:
    return table((*more, "figure", "base", "here", "here / base", "of single rounds", ""), list(rows))


def _cell(figures: Sequence[Figure]) -> str:
    """Write the median over the rounds, and the lowest and highest round."""
    values = [figure.median for figure in figures]
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return f"{number(statistics.median(values))} {figures[0].unit}{spread}"


def _environment(checkout: Path) -> dict[str, str]:
    path = os.pathsep.join(str(checkout / folder) for folder in ("libs", "kernels", "."))
    return os.environ | {"PYTHONPATH": path}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="COMMIT", help="or the folder of a checkout")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="at most (default: 3)")
    parser.add_argument("--minutes", type=float, help="begin no round that would end after them")
    parser.add_argument(
        "--run", action="append", default=[], metavar="LINE", help="another benchmark with its options"
    )
    parser.add_argument(
        "--same-kernels", action="store_true", help="copy compiled kernels even if their sources differ"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the last table there, too")
    parser.add_argument("names", nargs="*", choices=[*SUITE, []], metavar="NAME", help=", ".join(SUITE))
    return parser


if __name__ == "__main__":
    sys.exit(main())
