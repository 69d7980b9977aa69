"""One measured figure: its samples, their median and spread, and the limit that the machine sets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    """Samples of one quantity. Figures of the same name are rounds of one figure."""

    name: str
    unit: str = ""
    samples: tuple[float, ...] = ()
    """Empty if it could not be measured; then `error` or `note` says why."""
    limit: float | None = None
    """Best value that the machine allows, in `unit`; None if nothing bounds the figure."""
    less_is_better: bool = False
    note: str = ""
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def fraction(self) -> float | None:
        """Part of the limit that was reached: 1 is all of it. None without a limit."""
        if not self.limit or not self.samples or not self.median:
            return None
        return self.limit / self.median if self.less_is_better else self.median / self.limit

    def joined(self, later: Figure) -> Figure:
        """Return the later round with the samples of both."""
        return replace(later, samples=self.samples + later.samples, error=later.error or self.error)

    def as_json(self) -> dict[str, Any]:
        """Return what a program reads; absent keys say nothing."""
        values: dict[str, Any] = {"name": self.name, "unit": self.unit}
        if self.samples:
            values |= {"median": self.median, "low": min(self.samples), "high": max(self.samples)}
            values |= {"samples": list(self.samples)}
        optional = {
            "limit": self.limit,
            "fraction": self.fraction,
            "note": self.note,
            "error": self.error,
            "less_is_better": self.less_is_better,
        }
        return values | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Figure:
        """Read what `as_json` wrote."""
        known = ("limit", "less_is_better", "note", "error")
        given = {name: values[name] for name in known if name in values}
        return cls(values["name"], values["unit"], tuple(values.get("samples", ())), **given)


def rate(
    name: str, unit: str, amount: float, seconds: Sequence[float], limit: float | None = None, note: str = ""
) -> Figure:
    """Return `amount` per second, a sample for each of `seconds`."""
    return Figure(name, unit, tuple(amount / sample_s for sample_s in seconds), limit, note=note)


def distribution(name: str, unit: str, values: Sequence[float] | np.ndarray) -> Iterator[Figure]:
    """Yield the mean, the median and the 99th percentile of one round's values."""
    p50, p99 = np.percentile(values, [50, 99])
    for statistic, value in (("mean", np.mean(values)), ("p50", p50), ("p99", p99)):
        yield Figure(f"{name}, {statistic}", unit, (float(value),))


def number(value: float) -> str:
    """Write four significant digits, and all digits of what is larger."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
