"""The benchmarks follow the sources: all can be imported, and those that start no process run at toy sizes."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import core_arrivals, core_step, pipeline_stages
from benchmarks.harness.command import Measure, module_command
from benchmarks.stack import faults
from tests.chaos.recorder import Seen

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
        pytest.param(
            core_step.measure,
            {"running": [3], "steps": 5, "steps_in_flight": 2, "windows": 2},
            32,
            marks=pytest.mark.thorough,
        ),
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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("fault", ["failover", "worker_killed", "frontend_death"])
def test_no_token_is_lost_when_a_process_is_killed(fault: str) -> None:
    options = {"streams": 4, "tokens": 100, "kills": 1, "keep_s": 2.0}
    figures = list(faults.measure(argparse.Namespace(fault=fault, **options)))
    name_to_value = {figure.name.rpartition(": ")[2]: figure.median for figure in figures}
    names = ("streams that failed", "tokens changed", "tokens lost", "tokens repeated")
    assert [name_to_value[name] for name in names] == [0, 0, 0, 0]
    assert name_to_value["longest gap, of all"] > 0


def test_the_silence_beyond_a_restart_ends_with_the_longest_gap_since_the_kill() -> None:
    times = {
        "hit": (0.0, 1.0, 1.1, 3.0, 3.1, 5.0, 5.1),
        "twice": (0.9, 1.0, 3.5, 4.1, 6.0),
        "missed": (1.2, 1.3),
    }
    history = [Seen(at_s, name, "delta") for name, all_s in times.items() for at_s in all_s]
    result = faults.Run([], history, kills_s=[1.05, 4.0], restarts_s=[1.5, 0.75])
    found = faults.silences_beyond_restarts(result)
    assert found == pytest.approx([3.0 - 2.55, 5.0 - 4.75, 3.5 - 2.55, 6.0 - 4.75])


SMALL = {
    "engine.engine_extremes": "--rounds 1",
    "stack.disaggregated": "--rounds 1 --prompts 1 --streams 2 --prompt-tokens 500 --slowdown 1",
    "stack.frontend_load": "--rounds 1 --streams 2 --output-len 8 --requests 1",
    "stack.hostile": "--rounds 1 --seconds 1 --attacks urgent",
    "stack.memory_by_load": "--requests 300 --waiting 20 --connections 5",
    "stack.network_delay": "--rounds 1 --steps 20 --delays 0",
    "stack.overload": "--rounds 1 --seconds 1",
    "stack.pipeline_parallel": "--rounds 1 --streams 2 --input-len 8 --output-len 8 --simulation.enabled=true",
    "stack.pooled_flood": "--rounds 1 --seconds 1 --step-ms 2 --texts 20 --tokens 50",
    "stack.resident_memory": "--minutes 0.05 simulation.enabled=true",
    "stack.scale": "--loads 1x0 1x2 --step-s 0.5 --measure-s 2",
    "stack.short_requests": "--rounds 1 --requests 8 --what generation --simulated",
    "worker.step_breakdown": "--rounds 1 --quantization q4 --prefill 64 --rows 2 --steps 2",
    "worker.step_round_trip": "--rounds 1 --steps 50",
}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_runs_as_a_command(name: str, tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    command = module_command(f"benchmarks.{name}", "--json", report, *SMALL[name].split())
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any("median" in figure for figure in json.loads(report.read_text())["figures"])
