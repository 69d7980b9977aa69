"""Plots: how latencies of one measurement are distributed, what happened when, and latencies of a sweep by load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from triptych.cli.bench.sweep import Point
from triptych.client.load.run import LoadResult
from triptych.client.load.statistics import figures_ms, in_flight
from triptych.errors import ConfigError, FeatureDisabled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}


def check_plot(file: Path) -> None:
    """Check before a measurement that its plot can be written.

    Raises:
        FeatureDisabled: matplotlib is not installed.
        ConfigError: The file's folder does not exist, or it is to be no SVG.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise FeatureDisabled("--plot", "needs matplotlib; pip install 'triptych[bench]'") from None
    if file.suffix != ".svg" or not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: expected a file *.svg in a folder that exists")


def write_plot(file: Path, result: LoadResult) -> None:
    """Write the plot as SVG.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (shares, starts), (load, rate) = figure.subplots(2, 2)
    good = [record for record in result.records if not record.error]
    found = [figures_ms(record) for record in good]
    for name, label in _NAMES.items():
        values = sorted(own[name] for own in found if name in own)
        if values:
            shares.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label)
    shares.set(title="Share of requests within a latency", xlabel="ms", xscale="log", ylim=(0, 1))
    for name in ("ttft", "e2el"):
        pairs = [(record.due_s, own[name]) for record, own in zip(good, found, strict=True) if name in own]
        if pairs:
            starts.plot(*zip(*pairs, strict=True), ".", label=_NAMES[name])
    if found:
        shares.legend()
        starts.legend()
    for record in result.records:
        if record.error:
            starts.axvline(record.due_s, color="red", alpha=0.3)
    starts.set(title="Latency by the time that a request was due (red: failed)", xlabel="s", ylabel="ms")
    load.step(*in_flight(result.records), where="post")
    load.set(title="Requests in flight", xlabel="s", ylim=(0, None))
    times_s, per_s = _tokens_per_s(result)
    rate.step(times_s, per_s, where="post")
    rate.set(title="Output tokens/s", xlabel="s", ylim=(0, None))
    _save(figure, file)


def write_sweep_plot(file: Path, points: Sequence[Point]) -> None:
    """Write latencies and goodput by load as SVG. Points that are not valid are rings.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    first, gaps, goodput = figure.subplots(1, 3)
    rates = [point.offered_per_s for point in points]
    bad = [index for index, point in enumerate(points) if point.why_invalid]
    for axes, title, name in (
        (first, "Time to first token", "ttft_ms"),
        (gaps, "Gap between outputs", "itl_ms"),
    ):
        for percentile in ("p50", "p99"):
            values = [getattr(point.summary, name).percentiles[percentile] for point in points]
            axes.plot(rates, values, "o-", label=percentile)
            axes.plot([rates[i] for i in bad], [values[i] for i in bad], "o", color="white", markersize=3)
        axes.set(title=title, xlabel="offered requests/s", ylabel="ms", xlim=(0, None), ylim=(0, None))
        axes.legend()
    goodput.plot(rates, rates, ":", color="gray", label="offered")
    goodput.plot(rates, [point.summary.requests_per_s for point in points], "o-", label="answered")
    if points and points[0].goodput_per_s is not None:
        goodput.plot(rates, [point.goodput_per_s for point in points], "o-", label="within all goals")
    goodput.set(title="Requests/s", xlabel="offered requests/s", xlim=(0, None), ylim=(0, None))
    goodput.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "triptych"}):  # small, and the same each time
        _save(figure, file, {"Date": None})


def _save(figure: Figure, file: Path, metadata: dict[str, None] | None = None) -> None:
    try:
        figure.savefig(file, format="svg", metadata=metadata)
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror or error}") from None


def _tokens_per_s(result: LoadResult, num_bins: int = 100) -> tuple[list[float], list[float]]:
    """Return the edges and the rates of equal parts of the time; tokens are shared out among a request's arrivals."""
    times_s = [time_s for record in result.records for time_s in record.piece_times_s]
    weights = [
        record.counts.num_output / len(record.piece_times_s)
        for record in result.records
        for _ in record.piece_times_s
    ]
    counts, edges = np.histogram(times_s, num_bins, (0.0, max(result.duration_s, 1e-9)), weights=weights)
    return edges[:-1].tolist(), (counts / np.diff(edges)).tolist()
