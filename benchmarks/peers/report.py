"""The tables of the comparison: engines and rows, and Triptych's best mode beside the best peer of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness.figures import Figure, number
from benchmarks.harness.report import table
from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import Row


def text(engines: Sequence[Engine], rows: Sequence[Row], figures: Mapping[str, Figure]) -> str:
    """Return both tables, what was left out, and the failures."""
    absent = [figure for figure in figures.values() if not figure.samples]
    left_out = "\n".join(f"{figure.name}: {figure.note}" for figure in absent if figure.note)
    failures = "\n".join(
        f"failed: {figure.name}: {figure.error}" for figure in figures.values() if figure.error
    )
    parts = (engines_table(engines, rows, figures), ratios_table(engines, rows, figures), left_out, failures)
    return "\n\n".join(filter(None, parts))


def engines_table(engines: Sequence[Engine], rows: Sequence[Row], figures: Mapping[str, Figure]) -> str:
    """Return a line of medians and spreads for each engine that was measured."""

    def cell(figure: Figure | None) -> str:
        if figure is None:
            return ""
        low, high = min(figure.samples), max(figure.samples)
        return number(figure.median) + (f" ({number(low)} to {number(high)})" if low < high else "")

    head = ["engine", "weights", "mode", *(f"{row.title}, {row.unit}" for row in rows)]
    body = [
        [engine.product, engine.weights, engine.mode, *(cell(figures.get(row.name(engine))) for row in rows)]
        for engine in engines
        if any(row.name(engine) in figures for row in rows)
    ]
    return table(head, body) if body else ""


def ratios_table(engines: Sequence[Engine], rows: Sequence[Row], figures: Mapping[str, Figure]) -> str:
    """Return Triptych's best mode over the best peer, any weights allowed, then of 16 bits or more."""
    head = ["row", "weights", "best peer", "its figure", "Triptych", "its figure", "Triptych / best peer"]
    body = []
    for row in rows:
        for weights, allowed in (
            ("any", engines),
            ("16 bits or more", [e for e in engines if not e.is_quantized]),
        ):
            ours = best(row, (engine for engine in allowed if not engine.is_peer), figures)
            peer = best(row, (engine for engine in allowed if engine.is_peer), figures)
            if ours is not None and peer is not None:
                our_median, peer_median = (figures[row.name(one)].median for one in (ours, peer))
                ratio = f"{our_median / peer_median:.2f}" if peer_median else "-"
                title = f"{row.title}, {row.unit}{' (less is better)' if row.less_is_better else ''}"
                body.append(
                    [title, weights, peer.name, number(peer_median), ours.name, number(our_median), ratio]
                )
    return table(head, body) if body else ""


def best(row: Row, engines: Iterable[Engine], figures: Mapping[str, Figure]) -> Engine | None:
    """Return the engine of the best median in a row, or None if none was measured."""
    measured = [engine for engine in engines if row.name(engine) in figures]
    pick = min if row.less_is_better else max
    return pick(measured, key=lambda engine: figures[row.name(engine)].median, default=None)
