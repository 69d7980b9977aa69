"""The table that a benchmark prints, and the JSON file that holds every sample."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import Figure, number


class Report:
    """Collects figures by name, in the order in which they came first."""

    def __init__(self, benchmark: str, machine: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.name_to_figure: dict[str, Figure] = {}
        self._head = {"benchmark": benchmark, "machine": machine, "arguments": arguments}

    @property
    def num_failed(self) -> int:
        return sum(bool(figure.error) for figure in self.name_to_figure.values())

    def add(self, figure: Figure) -> None:
        """Take another round of a figure, and show it on stderr."""
        known = self.name_to_figure.get(figure.name)
        self.name_to_figure[figure.name] = known.joined(figure) if known else figure
        print(f"  {figure.name}: {_value(figure)}", file=sys.stderr, flush=True)

    def as_json(self) -> str:
        figures = [figure.as_json() for figure in self.name_to_figure.values()]
        return json.dumps({**self._head, "figures": figures}, indent=1, default=str) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file; a benchmark that is killed leaves what it had."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(self.as_json())
        os.replace(draft, path)


def figures_table(name_to_figure: Mapping[str, Figure]) -> str:
    """Return a line for each figure."""
    head = ("figure", "median", "low to high", "of limit", "limit", "note")
    return table(head, [_cells(figure) for figure in name_to_figure.values()])


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns that are empty throughout."""
    kept = [column for column in range(len(head)) if any(line[column] for line in body)]
    lines = [[line[column] for column in kept] for line in (head, *body)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _cells(figure: Figure) -> list[str]:
    spread = (
        "" if len(figure.samples) < 2 else f"{number(min(figure.samples))} to {number(max(figure.samples))}"
    )
    fraction = "" if figure.fraction is None else f"{figure.fraction:.1%}"
    limit = "" if figure.limit is None else number(figure.limit)
    return [figure.name, _value(figure), spread, fraction, limit, figure.note]


def _value(figure: Figure) -> str:
    measured = f"{number(figure.median)} {figure.unit}".strip() if figure.samples else ""
    return f"{measured} FAILED: {figure.error}".strip() if figure.error else measured
