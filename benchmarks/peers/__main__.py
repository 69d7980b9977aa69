"""Installs the peers, measures them and Triptych in turn, and sets the best of both beside each other.

    make bench-peers                                             all of it: half an hour per round on two cores
    make bench-peers ARGS="--install-only"                       only environments and models
    make bench-peers ARGS="--engines vllm triptych --rows 1 64 --rounds 3"
    make bench-peers ARGS="--instruction-set avx2"               as on a machine that has no more
    make bench-peers ARGS="--model FILE.gguf --rows 1"           llama.cpp and Triptych on this file as it is
    make bench-peers ARGS="--model mixture --rows 1 8 32"        the same on random weights, 8 of 64 experts, in Q4_0

Every engine gets the same prompts, all physical cores, and a process of its own in every round. Rates of n
streams are output tokens over the wall time of the whole batch, prefill included, 128 tokens in and 128 out. Let
nothing else run meanwhile. An interrupted installation is resumed by the next run.
"""

from __future__ import annotations

import argparse
import datetime
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.peers import models, report
from benchmarks.peers.engines import AVX2, ENGINES, engines_of_file, matching_engines
from benchmarks.peers.environments import InstallError, peers_home
from benchmarks.peers.measurement import ROWS, measure_rounds
from triptych.errors import TriptychError
from triptych.hub.resolve import EMBEDDED


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    engines = [engine for engine in ENGINES if any(engine in group for group in arguments.engines)]
    if arguments.model is not None:
        engines = list(engines_of_file(arguments.model))
    if arguments.instruction_set == AVX2:
        for engine in engines:
            if engine.hold is None:
                yield Figure(f"{engine.name}: {AVX2}", note=f"left out: nothing holds it to {AVX2}")
        engines = [engine.hold(engine) for engine in engines if engine.hold is not None]
    try:
        for engine in engines:
            engine.prepare()
    except (InstallError, TriptychError) as error:
        yield Figure("installation", error=str(error))
        return
    if not arguments.install_only:
        rows = [row for row in ROWS if row.key in arguments.rows]
        vocab_size = models.vocab_size(str(arguments.model or EMBEDDED))
        yield from measure_rounds(engines, rows, arguments.rounds, vocab_size=vocab_size, seed=arguments.seed)


def _model_file(text: str) -> Path:
    return models.random_mixture() if text == "mixture" else Path(text)


if __name__ == "__main__":
    row_keys = [row.key for row in ROWS]
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument(
        "--engines", nargs="+", metavar="NAME", type=matching_engines, default=[ENGINES],
        help=f"names, or the start of several (`llama.cpp`), of {', '.join(e.name for e in ENGINES)}; default: all",
    )  # fmt: skip
    parser.add_argument("--rows", nargs="+", choices=row_keys, default=row_keys, help="default: all")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="default: a new one")
    parser.add_argument(
        "--instruction-set", choices=("auto", AVX2), default="auto",
        help="hold Triptych and the peers to it; those that cannot be held are left out (default: what there is)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=_model_file, metavar="FILE",
        help="compare llama.cpp and Triptych on this .gguf file as it is, or on a `mixture` of random weights "
        "(default: all engines, the embedded model)",
    )  # fmt: skip
    parser.add_argument("--install-only", action="store_true", help="only environments and models")
    results = peers_home() / "results" / f"{datetime.datetime.now():%Y-%m-%dT%H-%M-%S}.json"
    parser.set_defaults(json=results)
    model = parser.parse_args().model
    compared = ENGINES if model is None else engines_of_file(model)
    sys.exit(run(parser, measure, text=lambda figures: report.text(compared, ROWS, figures)))
