"""`make bench-peers`: install the peers, measure them and Triptych in turn, print who is how fast.

  make bench-peers                                             all of it: half an hour per round on two cores
  make bench-peers ARGS="--install-only"                       environments and models alone
  make bench-peers ARGS="--engines vllm triptych --rows 1 64 --rounds 3"

Every engine gets the same prompts, all physical cores, and a process of its own in every round. Rates of n
streams are output tokens over the wall time of the whole batch, prefill included, 128 tokens in and 128 out. Let
nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import models, report
from benchmarks.peers.engines import ENGINES, Engine
from benchmarks.peers.environments import InstallError, peers_home
from benchmarks.peers.machine import BUSY_LOAD, compute_cpus, describe
from benchmarks.peers.measurement import Failure, Sample, Setup, measure_rounds
from benchmarks.peers.rows import ROWS, Row
from triptych.errors import TriptychError


def main(argv: Sequence[str]) -> int:
    """0: every engine gave every figure; 1: one did not, or could not be installed; 2: wrong usage."""
    arguments = _parse(argv)
    if arguments.list:
        for engine in ENGINES:
            print(f"{engine.name:32} {'installed' if _is_installed(engine) else 'not installed'}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the engine that runs ends with us
    try:
        for engine in arguments.engines:
            engine.prepare()
        return 0 if arguments.install_only else _measure(arguments)
    except (InstallError, TriptychError) as error:
        print(f"bench-peers: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("bench-peers: interrupted; the next run resumes with what is whole", file=sys.stderr)
    return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", type=_matching_engines, metavar="NAME",
        help="names, or the start of several (`llama.cpp`); default: all",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", choices=[row.key for row in ROWS], metavar="ROW",
        help=f"{', '.join(row.key for row in ROWS)}; default: all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="(default: 3)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the prompts (default: another one in every run)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every sample (default: results/, beside the environments)"
    )
    parser.add_argument("--install-only", action="store_true", help="environments and models alone")
    parser.add_argument("--list", action="store_true", help="name the engines and whether they are installed")
    arguments = parser.parse_args(argv)
    chosen = {engine.name for group in arguments.engines or [ENGINES] for engine in group}
    arguments.engines = [engine for engine in ENGINES if engine.name in chosen]
    arguments.rows = [row for row in ROWS if arguments.rows is None or row.key in arguments.rows]
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1 << 32)
    return arguments


def _matching_engines(name: str) -> list[Engine]:
    found = [engine for engine in ENGINES if engine.name == name]
    found = found or [engine for engine in ENGINES if engine.name.startswith(f"{name}-")]
    if not found:
        known = ", ".join(engine.name for engine in ENGINES)
        raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range, allowed is >= 1")
    return number


def _is_installed(engine: Engine) -> bool:
    return engine.environment is None or engine.environment.is_installed


def _measure(arguments: argparse.Namespace) -> int:
    engines: list[Engine] = arguments.engines
    rows: list[Row] = arguments.rows
    machine = {**describe(), "seed": arguments.seed, "rounds": arguments.rounds}
    print(f"{machine}", file=sys.stderr)
    if machine["load_average"] > BUSY_LOAD:
        print(
            f"bench-peers: the load average is {machine['load_average']}: others compute, and the figures will "
            "say little",
            file=sys.stderr,
        )
    setup = Setup(tuple(rows), compute_cpus(), models.vocab_size(), arguments.seed)
    samples: list[Sample] = []
    failures: list[Failure] = []
    is_whole = False
    with contextlib.suppress(KeyboardInterrupt):  # what has been measured by then is reported
        for result in measure_rounds(engines, setup, arguments.rounds, _show):
            if isinstance(result, Sample):
                samples.append(result)
                row = next(row for row in rows if row.key == result.row)
                _show(f"  {row.title}: {result.value:.2f} {row.unit}")
            else:
                failures.append(result)
                _show(f"  failed: {result.reason}")
        is_whole = True
    if not is_whole:
        _show("interrupted: these are the figures so far")
    print(report.text(engines, rows, report.collect(samples), failures))
    target = arguments.json or _default_target()
    values = report.as_json(engines, rows, samples, failures, machine)
    target.write_text(json.dumps(values, indent=2) + "\n")
    _show(f"every sample: {target}")
    return 0 if is_whole and not failures else 1


def _default_target() -> Path:
    directory = peers_home() / "results"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{datetime.datetime.now():%Y-%m-%dT%H-%M-%S}.json"


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
