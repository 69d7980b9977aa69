"""Measuring with an engine that computes nothing: rows, prompts, processes and deadlines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import descendants, runs
from benchmarks.peers import measurement
from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import (
    IDLE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MEMORY,
    ROWS,
    START,
    START_CPU,
    Row,
    Workload,
    draw_prompts,
    measure_rounds,
)
from benchmarks.peers.models import ADAPTERS

PAIR = Row("8", "2 streams", "tok/s", workload=Workload(2, 5, 3), repeats=2)
PREFILL = Row("prefill", "prefill", "tok/s", workload=Workload(1, 10, 1))
WORKLOAD = Workload(3, 20, 5)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    monkeypatch.setattr(measurement, "ROWS", (PAIR, PREFILL, START, MEMORY, IDLE))


def engine(name: str = "fake", **options: str) -> Engine:
    return Engine(
        name, "", "", str(Path(__file__).with_name("fake_adapter.py")), lambda: "nothing",
        options=lambda: options, env=lambda cpus: {"PYTHONPATH": str(ADAPTERS)},
    )  # fmt: skip


def figures_of(*engines: Engine, rows: tuple[Row, ...] = (PAIR,), rounds: int = 1) -> list[Figure]:
    return list(measure_rounds(engines, rows, rounds, vocab_size=100, seed=1))


def test_engines_take_turns_and_every_batch_is_a_sample():
    figures = figures_of(engine("a", wall_s="2"), engine("b", wall_s="3"), rows=(PAIR, PREFILL), rounds=2)
    assert figures == [
        Figure(f"{name}: {row.title}", "tok/s", (value,))
        for _ in range(2)
        for name, wall_s in (("a", 2), ("b", 3))
        for row, value in ((PAIR, 2 * 3 / wall_s), (PAIR, 2 * 3 / wall_s), (PREFILL, 10 / wall_s))
    ]


def test_start_and_memory_count_the_whole_process():
    start, cpu, memory = figures_of(engine(wall_s="0"), rows=(START, START_CPU, MEMORY))
    assert [figure.name for figure in (start, cpu, memory)] == [
        "fake: start to first token", "fake: CPU time of a start", "fake: peak memory",
    ]  # fmt: skip
    assert 0.01 < start.median < 30  # a Python interpreter has started; the claimed wall time plays no part
    assert 0.005 < cpu.median < 30
    assert 0.005 < memory.median < 1


def test_idle_engine_takes_no_cpu(monkeypatch):
    monkeypatch.setattr(measurement, "IDLE_SETTLE_S", 0.0)
    monkeypatch.setattr(measurement, "IDLE_S", 0.3)
    (idle,) = figures_of(engine(), rows=(IDLE,))
    assert 0 <= idle.median < 50


def test_engine_that_refuses_to_start_is_left_out():
    figures = figures_of(engine("a", does="refuse"), engine("b"), rounds=2)
    assert figures[0] == Figure("a: first start", error="ValueError: q3 is not a mode")
    assert [figure.name for figure in figures[1:]] == ["b: 2 streams"] * 4


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("stop early", r"new tokens per prompt are \[2, 2\] instead of 3"),
        ("die", "ended with status 3"),
        ("die at the end", "ended with status 3"),
        ("hang", "no answer after 0 s"),
    ],
)
def test_failure_is_reported(does, reason, monkeypatch):
    if does == "hang":
        monkeypatch.setattr(measurement, "RUN_TIMEOUT_S", 0.05)
    failure = figures_of(engine(does=does))[-1]
    assert re.search(reason, failure.error)


def test_nothing_that_an_engine_started_outlives_its_round(tmp_path):
    figures = figures_of(engine(does="leave a child"))
    assert all(figure.samples for figure in figures)
    children = re.findall(r"child (\d+)", (tmp_path / "peers/logs/fake.log").read_text())
    assert children
    assert not any(runs(process) for process in descendants(map(int, children)))


def test_interrupted_round_leaves_no_process():
    before = set(descendants([os.getpid()]))
    figures = measure_rounds([engine()], (PAIR,), 1, vocab_size=100, seed=1)
    assert next(figures).samples
    started = set(descendants([os.getpid()])) - before
    assert started
    figures.close()
    assert not any(runs(process) for process in started)


def test_environment_leaves_threads_to_the_adapter(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in measurement.environment(engine(), (0, 1))


def test_prompts_depend_on_their_key_only():
    prompts = draw_prompts(WORKLOAD, 1000, 7, 1, 0)
    assert prompts == draw_prompts(WORKLOAD, 1000, 7, 1, 0)
    assert all(prompts != draw_prompts(WORKLOAD, 1000, *key) for key in ((8, 1, 0), (7, 2, 0), (7, 1, 1)))


def test_prompts_have_the_given_shape_and_share_no_prefix():
    prompts = draw_prompts(Workload(64, 128, 1), 49152, 0)
    assert [len(prompt) for prompt in prompts] == [128] * 64
    assert all(0 <= token_id < 49152 for prompt in prompts for token_id in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 64


def test_rates_count_output_tokens_but_prompt_tokens_of_a_prefill():
    by_key = {row.key: row.workload for row in ROWS if row.workload is not None}
    assert by_key["8"].tokens_per_s(2.0) == 8 * 128 / 2.0
    assert by_key["prefill"].tokens_per_s(0.5) == 1024 / 0.5


def test_every_workload_fits_the_limits_given_to_engines():
    workloads = [row.workload for row in ROWS if row.workload is not None]
    assert workloads
    assert all(one.num_prompts <= MAX_NUM_SEQS for one in workloads)
    assert all(one.input_len + one.output_len <= MAX_MODEL_LEN for one in workloads)
