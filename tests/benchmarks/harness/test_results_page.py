"""Pages of results, written from the JSON of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import results_page
from benchmarks.harness.figures import Figure
from benchmarks.harness.report import Report

MACHINE = {"cpu": "AMD EPYC 9B14 96-Core Processor", "cores": 2, "cpu_flags": ["avx2"], "load_average": 0.1}


def write_report(path: Path, benchmark: str, machine: dict[str, Any], **arguments: Any) -> Path:
    report = Report(benchmark, machine, arguments)
    report.add(Figure("decode", "us", (11.0,)))
    report.add(Figure("decode", "us", (13.0,)))
    report.add(Figure("prefill", error="no memory"))
    report.write(path)
    return path


def test_page_of_a_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_report(
        tmp_path / "a.json", "benchmarks.engine.core_step", MACHINE, rounds=2, json="a", running=[8, 64]
    )
    busy = MACHINE | {"load_average": 0.4}
    second = write_report(
        tmp_path / "b.json", "benchmarks.peers.__main__", busy, tiny=True, device=None, sim=False
    )
    folder = tmp_path / "results"
    arguments = [str(first), str(second), "--date", "2026-11-24", "--folder", str(folder)]
    assert results_page.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(folder / "2026-11-24-amd-epyc-9b14.md")
    text = (folder / "2026-11-24-amd-epyc-9b14.md").read_text()
    assert text.startswith("# 2026-11-24, AMD EPYC 9B14 96-Core Processor\n")
    assert "| cpu_flags | avx2 |" in text
    assert "| load average before, at most | 0.4 |" in text
    assert (
        "## engine.core_step\n\n`python -m benchmarks.engine.core_step --rounds 2 --running 8 64`\n" in text
    )
    assert "`python -m benchmarks.peers --tiny`" in text
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    assert ["", "decode", "12 us", "11 to 13", ""] in cells
    assert ["", "prefill", "FAILED: no memory", "", ""] in cells
    assert results_page.main(arguments) == 0  # its own page is written again


def test_reports_of_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_report(tmp_path / "a.json", "benchmarks.engine.core_step", MACHINE)
    second = write_report(tmp_path / "b.json", "benchmarks.stack.start", MACHINE | {"cores": 8})
    assert results_page.main([str(first), str(second), "--folder", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert "results: of another machine than benchmarks.engine.core_step: benchmarks.stack.start" in error
    assert not (tmp_path / "results").exists()


def test_page_that_a_person_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(tmp_path / "a.json", "benchmarks.engine.core_step", MACHINE)
    page = tmp_path / "2026-11-24-amd-epyc-9b14.md"
    page.write_text("mine\n")
    assert results_page.main([str(report), "--date", "2026-11-24", "--folder", str(tmp_path)]) == 2
    assert page.read_text() == "mine\n"
    assert "was written by hand" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", "2026-01-02-intel-xeon-gold-6248.md"),
        ("AMD EPYC 7B13", "2026-01-02-amd-epyc-7b13.md"),
        ("Neoverse-V2", "2026-01-02-neoverse-v2.md"),
    ],
)
def test_file_name(cpu: str, name: str) -> None:
    assert results_page.file_name("2026-01-02", cpu) == name


def test_command_reads_back(tmp_path: Path) -> None:
    arguments = {"minutes": 2.0, "modes": ["a b", "c"], "options": ["cache.num_blocks=9"]}
    path = write_report(tmp_path / "a.json", "benchmarks.x", MACHINE, **arguments)
    words = "python -m benchmarks.x cache.num_blocks=9 --minutes 2.0 --modes 'a b' c"
    assert results_page.command(json.loads(path.read_text())) == words
