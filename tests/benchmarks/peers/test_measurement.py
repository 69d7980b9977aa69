"""Measuring with an engine that computes nothing: the driver's end of it, processes and deadlines included."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.peers import measurement
from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import Failure, Sample, Setup, measure_rounds
from benchmarks.peers.models import ADAPTERS
from benchmarks.peers.process_tree import descendants, runs
from benchmarks.peers.rows import IDLE, MEMORY, START, Row, Workload

PAIR = Row("8", "2 streams", "tok/s", workload=Workload(2, 5, 3), repeats=2)
PREFILL = Row("prefill", "prefill", "tok/s", workload=Workload(1, 10, 1))


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    monkeypatch.setattr(measurement, "ROWS", (PAIR, PREFILL, START, MEMORY, IDLE))


def engine(name: str = "fake", **options: str) -> Engine:
    return Engine(
        name, "", "", str(Path(__file__).with_name("fake_adapter.py")), lambda: "nothing",
        options=lambda: options, env=lambda cpus: {"PYTHONPATH": str(ADAPTERS)},
    )  # fmt: skip


def results_of(*engines: Engine, rows: tuple[Row, ...] = (PAIR,), rounds: int = 1) -> list[Sample | Failure]:
    return list(measure_rounds(engines, Setup(rows, (0,), 100, seed=1), rounds, lambda line: None))


def test_engines_take_turns_and_every_batch_is_a_sample():
    results = results_of(engine("a", wall_s="2"), engine("b", wall_s="3"), rows=(PAIR, PREFILL), rounds=2)
    assert results == [
        Sample(name, row, round_number, value)
        for round_number in (1, 2)
        for name, wall_s in (("a", 2), ("b", 3))
        for row, value in (("8", 2 * 3 / wall_s), ("8", 2 * 3 / wall_s), ("prefill", 10 / wall_s))
    ]


def test_start_is_measured_from_the_process_on_and_memory_counts_processes_that_have_ended():
    start, memory = results_of(engine(wall_s="0"), rows=(START, MEMORY))
    assert isinstance(start, Sample)
    assert isinstance(memory, Sample)
    assert (start.row, memory.row) == ("start", "memory")
    assert 0.01 < start.value < 30  # a Python interpreter has started; the claimed wall time plays no part
    assert memory.value == 7_000


def test_an_idle_engine_takes_no_cpu(monkeypatch):
    monkeypatch.setattr(measurement, "IDLE_SETTLE_S", 0.0)
    monkeypatch.setattr(measurement, "IDLE_S", 0.3)
    (idle,) = results_of(engine(), rows=(IDLE,))
    assert isinstance(idle, Sample)
    assert 0 <= idle.value < 50


def test_rows_that_an_engine_cannot_be_measured_in_are_left_out():
    only_start = Engine(
        "fake", "", "", str(Path(__file__).with_name("fake_adapter.py")), lambda: "nothing",
        env=lambda cpus: {"PYTHONPATH": str(ADAPTERS)}, rows=("start",),
    )  # fmt: skip
    assert [result.row for result in results_of(only_start, rows=(PAIR, START))] == ["start"]


def test_an_engine_that_refuses_its_mode_takes_part_no_further_and_the_others_go_on():
    results = results_of(engine("a", does="refuse"), engine("b"), rounds=2)
    assert results[0] == Failure("a", 0, "ValueError: q3 is not a mode")
    assert [result.engine for result in results[1:]] == ["b"] * 4


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("stop early", r"new tokens per prompt are \[2, 2\] instead of 3"),
        ("die", "ended with status 3"),
        ("die at the end", "ended with status 3"),
        ("hang", "no answer after 0 s"),
    ],
)
def test_a_failure_is_told(does, reason, monkeypatch):
    if does == "hang":
        monkeypatch.setattr(measurement, "RUN_MARGIN_S", 0.05)
        monkeypatch.setattr(measurement, "SLOWEST_TOKENS_PER_S", 1e9)
    failure = results_of(engine(does=does))[-1]
    assert isinstance(failure, Failure)
    assert re.search(reason, failure.reason)


def test_nothing_that_an_engine_has_started_outlives_its_round(tmp_path):
    results = results_of(engine(does="leave a child"))
    assert all(isinstance(result, Sample) for result in results)
    children = re.findall(r"child (\d+)", (tmp_path / "peers/logs/fake.log").read_text())
    assert children
    assert not any(runs(process) for process in descendants(map(int, children)))


def test_a_round_that_is_broken_off_leaves_no_process():
    before = set(descendants([os.getpid()]))
    results = measure_rounds([engine()], Setup((PAIR,), (0,), 100, seed=1), 1, lambda line: None)
    assert isinstance(next(results), Sample)
    started = set(descendants([os.getpid()])) - before
    assert started
    results.close()
    assert not any(runs(process) for process in started)


def test_the_environment_tells_threads_nothing_but_what_the_adapter_tells(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in measurement._environment(engine(), (0, 1))
