"""The table that is printed as figures come in, and the JSON that holds them all. Needs no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

_NAME_WIDTH = 52
_VALUE_WIDTH = 26


class Report:
    """Prints each outcome at once and rewrites the file after each."""

    def __init__(self, out: TextIO, path: Path) -> None:
        self.titles: list[str] = []
        self.index_to_outcome: dict[int, dict[str, Any]] = {}
        self._out = out
        self._path = path
        self._machine: dict[str, Any] = {}

    @property
    def num_failed(self) -> int:
        return sum("error" in outcome for outcome in self.index_to_outcome.values())

    def begin(self, machine: dict[str, Any]) -> None:
        """Note where the figures are from; once, though several processes may say it."""
        if not self._machine:
            self._machine = machine
            self._print(", ".join(f"{name} {value}" for name, value in machine.items()))
            self._print(
                f"{'figure':{_NAME_WIDTH}} {'value':>{_VALUE_WIDTH}} {'of limit':>9}   low .. high, limit, notes"
            )

    def add(self, index: int, outcome: dict[str, Any]) -> None:
        """`measured`, `error` or `skipped`, and the seconds that it took."""
        self.index_to_outcome[index] = {"figure": self.titles[index], **outcome}
        self._print(_line(self.titles[index], outcome))
        self.write()

    def write(self) -> None:
        """The file is whole at any time: a killed run leaves what it had."""
        figures = [outcome for _, outcome in sorted(self.index_to_outcome.items())]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.draft")
        draft.write_text(json.dumps({"machine": self._machine, "figures": figures}, indent=1) + "\n")
        os.replace(draft, self._path)

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _line(title: str, outcome: dict[str, Any]) -> str:
    start = f"{title:{_NAME_WIDTH}}"
    if "error" in outcome:
        return f"{start} {'FAILED':>{_VALUE_WIDTH}} {'':>9}   {outcome['error']}"
    if "skipped" in outcome:
        return f"{start} {'skipped':>{_VALUE_WIDTH}} {'':>9}   {outcome['skipped']}"
    measured = outcome["measured"]
    notes = []
    if measured["low"] is not None:
        notes.append(f"{_number(measured['low'])} .. {_number(measured['high'])}")
    if measured["limit"]:
        notes.append(f"limit {_number(measured['limit'])} {measured['unit']}, {measured['limit_name']}")
    if measured["note"]:
        notes.append(measured["note"])
    fraction = "" if measured["fraction"] is None else f"{measured['fraction']:.1%}"
    value = f"{_number(measured['value'])} {measured['unit']}"
    return f"{start} {value:>{_VALUE_WIDTH}} {fraction:>9}   {'; '.join(notes)}"


def _number(value: float) -> str:
    """Four figures that count."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
