"""The harness of the benchmarks: figures, tables, the command line, children, the comparison with another checkout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import command
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure, distribution
from benchmarks.harness.processes import Child, ChildError
from benchmarks.harness.report import table
from benchmarks.harness.timing import rounds_within


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for number in range(arguments.rounds):
        yield Figure("speed", "m/s", (10.0 * (number + 1),), limit=40.0)


@pytest.fixture(autouse=True)
def _signals_are_as_they_were() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_rounds_are_joined_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(create_parser("Speed.", rounds=3), measure, []) == 0
    assert "| speed  | 20 m/s | 10 to 30    | 50.0%    | 40    |" in capsys.readouterr().out


def test_json_holds_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "figures.json"
    assert run(create_parser("Speed.", rounds=2), measure, ["--json", str(path)]) == 0
    capsys.readouterr()
    assert run(create_parser("Speed.", rounds=2), measure, ["--json"]) == 0
    for written in (path.read_text(), capsys.readouterr().out):
        report = json.loads(written)
        assert report["machine"]["cpu"]
        (figure,) = report["figures"]
        assert (figure["samples"], figure["median"], figure["fraction"]) == ([10.0, 20.0], 15.0, 0.375)
        assert Figure.from_json(figure) == Figure("speed", "m/s", (10.0, 20.0), limit=40.0)


def test_failure_and_interruption_print_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: argparse.Namespace) -> Iterator[Figure]:
        yield Figure("a", "s", (1.0,))
        yield Figure("b", error="no luck")

    def interrupt(arguments: argparse.Namespace) -> Iterator[Figure]:
        yield Figure("a", "s", (1.0,))
        raise KeyboardInterrupt

    assert run(create_parser(""), fail, []) == 1
    assert "FAILED: no luck" in capsys.readouterr().out
    assert run(create_parser(""), interrupt, []) == 130
    assert "| a      | 1 s    |" in capsys.readouterr().out


def test_fraction_of_a_limit_that_bounds_from_below() -> None:
    assert Figure("time", "s", (4.0,), limit=1.0, less_is_better=True).fraction == 0.25


def test_distribution_of_steps() -> None:
    figures = {figure.name: figure.median for figure in distribution("step", "s", [1.0] * 99 + [101.0])}
    assert figures == {"step, mean": 2.0, "step, p50": 1.0, "step, p99": pytest.approx(2.0)}


def test_table_leaves_out_empty_columns() -> None:
    assert table(["a", "b", "c"], [["1", "", "x"], ["", "", "y"]]).splitlines()[0] == "| a | c |"


def test_rounds_fill_the_time_within_bounds() -> None:
    assert len(rounds_within(1.0, lambda: 0.1)) == 10
    assert len(rounds_within(1.0, lambda: 10.0)) == 5
    assert len(rounds_within(1.0, lambda: 1e-9)) == 100


def child(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", f"import json, sys, time\n{code}"]


def test_child_answers_until_it_ends() -> None:
    code = "for line in sys.stdin: print(json.dumps({'got': json.loads(line)['n']}))\nprint('{\"last\": 1}')"
    with Child(child(code)) as echo:
        assert echo.ask({"n": 3}, 60) == {"got": 3}
        echo.finish(60)
        with pytest.raises(ChildError, match="ended with status 0"):
            echo.receive(60)


def test_child_that_hangs_is_ended() -> None:
    with Child(child("time.sleep(60)")) as sleeper:
        with pytest.raises(ChildError, match=r"no answer after 0 s"):
            sleeper.receive(0.05)


def test_child_says_what_failed() -> None:
    with Child(child('print(\'{"error": "no model"}\')')) as failing:
        with pytest.raises(ChildError, match="no model"):
            failing.receive(60)


def test_a_benchmark_is_named_by_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    run(create_parser("Speed.", rounds=1), measure, ["--json"])
    assert json.loads(capsys.readouterr().out)["benchmark"] == "tests.benchmarks.test_harness"
    assert Path(__file__).parents[2] == command.ROOT
