"""The table: medians and spreads per engine, and Triptych against the best peer of each row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import Failure, Sample
from benchmarks.peers.rows import Row


@dataclass(frozen=True, slots=True)
class Figure:
    """One cell: what an engine gave in a row over all batches of all rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.least == self.most:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(self.least)} to {_short(self.most)})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: Triptych's best mode against the best peer."""

    row: Row
    ours: Engine
    peer: Engine
    our_figure: float
    peer_figure: float

    @property
    def ratio(self) -> float:
        """Triptych / peer: of rates, more is better; of times, memory and idle CPU, less."""
        return self.our_figure / self.peer_figure if self.peer_figure else float("inf")


Figures = dict[tuple[str, str], Figure]
"""(engine's name, row's key) -> figure; nothing where nothing was measured."""


def collect(samples: Iterable[Sample]) -> Figures:
    """Figures of all samples."""
    values: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        values.setdefault((sample.engine, sample.row), []).append(sample.value)
    return {key: Figure.of(each) for key, each in values.items()}


def best(row: Row, engines: Iterable[Engine], figures: Figures) -> Engine | None:
    """The engine of the best median in a row; None where none has been measured."""
    measured = [engine for engine in engines if (engine.name, row.key) in figures]
    if not measured:
        return None
    pick = min if row.less_is_better else max
    return pick(measured, key=lambda engine: figures[engine.name, row.key].median)


def compare(
    row: Row, engines: Sequence[Engine], figures: Figures, *, quantized: bool = True
) -> Comparison | None:
    """Triptych's best mode against the best peer; None where either has no figure.

    Args:
        quantized: False leaves out, on both sides, weights of less than 16 bits.
    """
    allowed = [engine for engine in engines if quantized or not engine.is_quantized]
    ours = best(row, (engine for engine in allowed if not engine.is_peer), figures)
    peer = best(row, (engine for engine in allowed if engine.is_peer), figures)
    if ours is None or peer is None:
        return None
    return Comparison(row, ours, peer, figures[ours.name, row.key].median, figures[peer.name, row.key].median)


def text(
    engines: Sequence[Engine], rows: Sequence[Row], figures: Figures, failures: Sequence[Failure]
) -> str:
    """Everything for people, in Markdown."""
    parts = [_figures_table(engines, rows, figures)]
    if any(not engine.is_peer for engine in engines):
        parts.append(_ratios_table(engines, rows, figures))
    if failures:
        lines = (f"- {one.engine}, {_round_name(one.round_number)}: {one.reason}" for one in failures)
        parts.append("Failed:\n" + "\n".join(lines))
    return "\n\n".join(parts)


def as_json(
    engines: Sequence[Engine],
    rows: Sequence[Row],
    samples: Sequence[Sample],
    failures: Sequence[Failure],
    machine: dict[str, Any],
) -> dict[str, Any]:
    """Everything for programs: every single sample too."""
    figures = collect(samples)
    return {
        "machine": machine,
        "engines": {
            engine.name: {
                "product": engine.product,
                "weights": engine.weights,
                "mode": engine.mode,
                "requirements": list(engine.environment.requirements) if engine.environment else [],
            }
            for engine in engines
        },
        "rows": [
            {
                "row": row.key,
                "title": row.title,
                "unit": row.unit,
                "less_is_better": row.less_is_better,
                "figures": {
                    engine.name: {
                        "median": figures[engine.name, row.key].median,
                        "samples": [
                            one.value for one in samples if (one.engine, one.row) == (engine.name, row.key)
                        ],
                    }
                    for engine in engines
                    if (engine.name, row.key) in figures
                },
                "any_weights": _comparison_json(compare(row, engines, figures)),
                "not_quantized": _comparison_json(compare(row, engines, figures, quantized=False)),
            }
            for row in rows
        ],
        "failures": [
            {"engine": one.engine, "round": one.round_number, "reason": one.reason} for one in failures
        ],
    }


def _figures_table(engines: Sequence[Engine], rows: Sequence[Row], figures: Figures) -> str:
    head = ["engine", "weights", "mode", *(f"{row.title}, {row.unit}" for row in rows)]
    body = [
        [
            engine.product,
            engine.weights,
            engine.mode,
            *(str(figures.get((engine.name, row.key), "-")) for row in rows),
        ]
        for engine in engines
    ]
    return _markdown(head, body)


def _ratios_table(engines: Sequence[Engine], rows: Sequence[Row], figures: Figures) -> str:
    head = ["row", "weights", "best peer", "its figure", "Triptych", "its figure", "Triptych / best peer"]
    body = []
    for row in rows:
        title = f"{row.title}, {row.unit}" + (" (less is better)" if row.less_is_better else "")
        for weights, quantized in (("any", True), ("16 bits or more", False)):
            comparison = compare(row, engines, figures, quantized=quantized)
            if comparison is None:
                body.append([title, weights, "-", "-", "-", "-", "-"])
                continue
            body.append(
                [
                    title,
                    weights,
                    comparison.peer.name,
                    _short(comparison.peer_figure),
                    comparison.ours.name,
                    _short(comparison.our_figure),
                    f"{comparison.ratio:.2f}",
                ]
            )
    return _markdown(head, body)


def _comparison_json(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "best_peer": comparison.peer.name,
        "triptych": comparison.ours.name,
        "ratio": comparison.ratio if comparison.peer_figure else None,
    }


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, body)])


def _round_name(round_number: int) -> str:
    return f"round {round_number}" if round_number else "first start"


def _short(value: float) -> str:
    """Three significant digits, as many before the point as there are."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
