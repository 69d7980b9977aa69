"""Run a recorded step journal again and report the first divergence.

  python -m tools.replay JOURNAL                                        against the scheduler of this version
  python -m tools.replay JOURNAL --against worker                       against a worker of the recorded config
  python -m tools.replay JOURNAL --against worker --address HOST:PORT   against a running worker without an engine

An engine records with --journal.path DIR. Against the scheduler, the recorded events are replayed at their recorded
times, and every step must come out the same, byte for byte. Against a worker the recorded steps are computed again,
and every token must be the same. In float32 it is, with as many threads, except near-ties (two best logits within
1e-4). In bfloat16, with another number of threads or on other hardware, near-ties are common, and a first difference
is no proof of a fault.

Exit codes: 0 no divergence, 1 a divergence, 2 no usable journal or worker.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.replay import engine, worker
from tools.replay.recorded_worker import recorded_worker
from triptych.errors import ConfigError, TriptychError
from triptych.wire.journal import JournalReader

EXIT_SAME = 0
EXIT_DIVERGED = 1
EXIT_UNUSABLE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("journal", type=Path, help="a file, or a directory: its newest journal is read")
    parser.add_argument(
        "--against", choices=("scheduler", "worker"), default="scheduler", help="default: scheduler"
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a free worker; without it one of the recorded config is started",
    )
    arguments = parser.parse_args(argv)
    try:
        result = _replay(arguments.journal, arguments.against, arguments.address)
    except TriptychError as error:
        print(f"tools.replay: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    print(result)
    return EXIT_DIVERGED if result.divergence else EXIT_SAME


def _replay(path: Path, against: str, address: str | None) -> engine.Replay | worker.Replay:
    if address and against != "worker":
        raise ConfigError("--address: names a worker, but --against is scheduler")
    with JournalReader(path) as journal:
        if against == "scheduler":
            return engine.replay(journal)
        if address:
            return asyncio.run(worker.replay(journal, address))
        with recorded_worker(journal.path) as started:
            return asyncio.run(worker.replay(journal, started.address, started.is_alive))


if __name__ == "__main__":
    raise SystemExit(main())
