"""Measures how far an engine's log-probabilities are from float32's, on the same weights.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --modes "model.quantization=q4" "model.quantization=q4 cache.dtype=int8"
    python -m benchmarks.accuracy --modes --peers llama.cpp openvino      peers are installed at first use (GBs)

The 20 prompts of tests/oracle, of 1 to 1,500 tokens, each with the 64 tokens that transformers chose in float32.
Every engine is given each prompt and these tokens, and says how likely each token was; the figure is the mean
of |its log-probability - float32's|. Nothing is timed: other processes may run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from benchmarks.accuracy.base import Pass, Scorer, Scores
from benchmarks.accuracy.peer_scorer import PeerScorer
from benchmarks.accuracy.transformers_scorer import TransformersScorer
from benchmarks.accuracy.triptych_scorer import TriptychScorer
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.report import table
from benchmarks.peers.engines import ENGINES, matching_engines
from tests.oracle.entries import Entry, read_entries
from triptych.hub.resolve import EMBEDDED, resolve_model

SHORT_PROMPT_LEN = 128
"""Prompts of docs/adr/0003, 0006 and 0007: their figures are means over the 14 prompts of at most this length."""
DEFAULT_MODES = (
    {"model.dtype": "float32", "model.quantization": "none"},
    {"model.dtype": "float32", "model.quantization": "q4"},
    {"model.dtype": "float32", "model.quantization": "q4", "cache.dtype": "int8"},
    {"model.dtype": "bfloat16", "model.quantization": "none"},
    {"model.dtype": "bfloat16", "model.quantization": "none", "cache.dtype": "int8"},
    {"model.dtype": "bfloat16", "model.quantization": "q4"},
    {"model.dtype": "bfloat16", "model.quantization": "q4", "cache.dtype": "int8"},
)
ALL = "mean"
SHORT = f"mean, prompts <= {SHORT_PROMPT_LEN}"
TAIL = "99th percentile"
CHANGED = "tokens changed"
COLUMNS = (ALL, SHORT, TAIL, CHANGED)
"""Figures of one engine and pass."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    directory = resolve_model(EMBEDDED)
    entries = read_entries(directory)[:: arguments.every]
    [(_, exact)] = TransformersScorer(directory, torch.float32).score(entries)
    scorers: list[Scorer] = [TransformersScorer(directory, torch.bfloat16)]
    scorers += [TriptychScorer(mode) for mode in arguments.modes]
    peers = [engine for engine in ENGINES if any(engine in group for group in arguments.peers)]
    scorers += [PeerScorer(engine) for engine in peers if engine.is_peer]
    for scorer in scorers:
        try:
            for how, scores in scorer.score(entries):
                yield from figures(f"{scorer.name}: {how.value}", entries, scores, exact)
        except Exception as error:  # the others are measured all the same
            yield Figure(scorer.name, error=f"{type(error).__name__}: {error}")


def figures(
    name: str, entries: Sequence[Entry], scores: Sequence[Scores], exact: Sequence[Scores]
) -> Iterator[Figure]:
    """Yield the distances of one engine's scores from the exact ones."""
    distances = [np.abs(ours.logprobs - theirs.logprobs) for ours, theirs in zip(scores, exact, strict=True)]
    short = [
        row for row, entry in zip(distances, entries, strict=True) if len(entry.prompt) <= SHORT_PROMPT_LEN
    ]
    changed = np.mean([~one.is_best for one in scores])
    column_to_value = {
        ALL: np.mean(distances),
        SHORT: np.mean(short),
        TAIL: np.percentile(distances, 99),
        CHANGED: 100 * changed,
    }
    for column, value in column_to_value.items():
        unit = "%" if column == CHANGED else ""
        yield Figure(f"{name}: {column}", unit, (float(value),), less_is_better=True)


def text(name_to_figure: Mapping[str, Figure]) -> str:
    """Return a line for each engine with the columns of each pass, then the failures."""
    head = ["engine", *(f"{how.value}: {column}" for how in Pass for column in COLUMNS)]
    failed = [figure for figure in name_to_figure.values() if figure.error]
    engines = dict.fromkeys(
        name.rsplit(": ", 2)[0] for name, figure in name_to_figure.items() if not figure.error
    )

    def cell(name: str) -> str:
        figure = name_to_figure.get(name)
        if figure is None:
            return ""
        if figure.unit:
            return f"{figure.median:.1f}{figure.unit}"
        return f"{figure.median:.4f}" if figure.median >= 1e-3 else f"{figure.median:.2g}"

    body = [[engine, *(cell(f"{engine}: {column}") for column in head[1:])] for engine in engines]
    failures = "\n".join(f"failed: {figure.name}: {figure.error}" for figure in failed)
    return "\n\n".join(filter(None, (table(head, body) if body else "", failures)))


def _mode(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split()]
    if not pairs or any(not separator for _, separator, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE …, as in model.quantization=q4")
    return {key: value for key, _, value in pairs}


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument(
        "--modes", nargs="*", type=_mode, default=DEFAULT_MODES, metavar="MODE",
        help="modes of Triptych: each a text of KEY=VALUE …, keys of its config; default: those of the documentation",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="+", type=matching_engines, default=[], metavar="NAME",
        help="peers, named as for `make bench-peers`; default: none",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="take every Nth prompt (default: all)"
    )
    sys.exit(run(parser, measure, text=text))
