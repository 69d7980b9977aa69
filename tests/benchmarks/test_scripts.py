"""The benchmarks follow the sources: all can be imported, and those that start no process run at toy sizes."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import core_arrivals, core_step, pipeline_stages
from benchmarks.harness.command import Measure

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("engine", "worker", "stack", "kernels", "peers", "accuracy")
    for path in sorted((ROOT / "benchmarks" / folder).glob("[!_]*.py"))
]


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize(
    ("measure", "options", "num_figures"),
    [
        (core_step.measure, {"running": [3], "steps": 5, "steps_in_flight": 2}, 15),
        (core_arrivals.measure, {"arrivals": 3, "prompt_len": 40}, 2),
        (
            pipeline_stages.measure,
            {"stages": [1, 2], "rows": 4, "prompt": 20, "tokens": 5, "round_trip_us": 100},
            6,
        ),
    ],
    ids=["core_step", "core_arrivals", "pipeline_stages"],
)
def test_engine_benchmark_measures(measure: Measure, options: dict, num_figures: int) -> None:
    figures = list(measure(argparse.Namespace(rounds=1, **options)))
    assert len(figures) == num_figures
    assert all(np.isfinite(figure.median) for figure in figures)
