"""The comparison of two checkouts: pairs of rounds, verdicts, failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import Pairs, RunError, figures_of, run_once, verdict
from benchmarks.harness.figures import Figure


def rows_of(base: list[float], here: list[float], unit: str) -> list[tuple[str, ...]]:
    pairs = Pairs()
    for old, new in zip(base, here, strict=True):
        pairs.add([Figure("a", unit, (old,)), Figure("only base", unit, (1.0,))], [Figure("a", unit, (new,))])
    return list(pairs.rows())


def test_a_ratio_is_taken_within_each_round() -> None:
    ((name, base, here, ratio, spread, said),) = rows_of([1.0, 2.0, 4.0], [1.1, 2.2, 4.8], "ms")
    assert (name, base, here) == ("a", "2 ms (1 to 4)", "2.2 ms (1.1 to 4.8)")
    assert (ratio, spread, said) == ("1.100", "1.100 to 1.200", "worse")


@pytest.mark.parametrize(
    ("unit", "ratios", "expected"),
    [
        ("us", [1.05, 1.2, 1.1], "worse"),
        ("us", [1.05, 1.2], ""),
        ("us", [0.99, 1.2, 1.3], ""),
        ("us", [1.02, 1.01, 1.04], ""),
        ("us", [0.9, 0.8, 0.9], "better"),
        ("tok/s", [0.9, 0.8, 0.9], "worse"),
        ("tok/s", [1.2, 1.1, 1.2], "better"),
        ("", [5.0, 5.0, 5.0], ""),
        ("us", [], ""),
    ],
)
def test_verdict_needs_every_round(unit: str, ratios: list[float], expected: str) -> None:
    assert verdict(unit, ratios) == expected


def test_figures_of_each_kind_of_output() -> None:
    (figure,) = figures_of('{"figures": [{"name": "a", "unit": "s", "samples": [1, 2]}]}')
    assert figure == Figure("a", "s", (1, 2))
    throughput = {
        figure.name: figure.unit for figure in figures_of('{"wall_s": 1.5, "ttft_p50_ms": 3, "x_per_s": 7}')
    }
    assert throughput == {"wall_s": "s", "ttft_p50_ms": "ms", "x_per_s": "tok/s"}
    assert figures_of("engine_step: 40.5 Python calls, mark 41") == [Figure("engine_step", "calls", (40.5,))]


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkouts with a benchmark each; the other one's answers with half of the figure."""
    code = 'import sys\nprint(\'{"figures": [{"name": "a", "unit": "ms", "samples": [%d]}]}\')'
    for folder, value in (("old", 2), ("new", 4)):
        module = tmp_path / folder / "benchmarks" / "toy.py"
        module.parent.mkdir(parents=True)
        module.write_text(code % value)
    monkeypatch.setattr(compare, "ROOT", tmp_path / "new")
    monkeypatch.setattr(compare, "SUITE", {"toy": "benchmarks.toy"})
    return tmp_path / "old", tmp_path / "new"


def test_each_checkout_runs_its_own_benchmark(
    checkouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--base", str(checkouts[0]), "--rounds", "3"])
    assert compare.main() == 1
    assert "2 ms (2 to 2) | 4 ms (4 to 4) | 2.000" in capsys.readouterr().out


def test_this_checkout_measures_the_services_of_another(checkouts: tuple[Path, Path]) -> None:
    code = 'import sys\nprint(\'{"figures": [{"name": "%s", "unit": "", "samples": [1]}]}\' % sys.argv[1])'
    (checkouts[1] / "benchmarks" / "toy.py").write_text(code)
    (figure,) = run_once(checkouts[0], "benchmarks.toy {checkout}")
    assert figure.name == str(checkouts[0])


def test_a_benchmark_that_fails_is_named(checkouts: tuple[Path, Path]) -> None:
    (checkouts[1] / "benchmarks" / "toy.py").write_text("raise SystemExit('no model')")
    with pytest.raises(RunError, match="toy ended with 1: no model"):
        run_once(checkouts[1], "benchmarks.toy")
