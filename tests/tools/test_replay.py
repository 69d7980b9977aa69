"""The command `python -m tools.replay`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.journals import RecordedRun, doctor
from tools.replay.__main__ import main
from triptych.types.journal import Submitted


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    run = RecordedRun(tmp_path).start()
    run.submit([1, 2, 3], sampling={"ignore_eos": True})
    run.run().engine.close()
    return tmp_path


def test_a_journal_that_comes_out_the_same_exits_with_0(
    journal: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(journal)]) == 0
    assert capfd.readouterr().out.startswith("12 steps, 1 requests: no divergence")


def test_a_divergence_is_printed_and_exits_with_1(journal: Path, capfd: pytest.CaptureFixture[str]) -> None:
    doctor(journal, lambda events: [event for event in events if not isinstance(event.what, Submitted)])
    assert main([str(journal)]) == 1
    assert "is not what it was" in capfd.readouterr().out


@pytest.mark.parametrize("against", ["scheduler", "worker"])
def test_no_journal_is_one_line_and_exits_with_2(
    against: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent"), "--against", against]) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert "absent: No such file or directory" in shown


def test_an_address_without_a_worker_to_run_against_is_wrong_usage(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(journal), "--address", "127.0.0.1:1"]) == 2
    assert "--address: names a worker" in capsys.readouterr().err


def test_nobody_at_the_workers_address_exits_with_2(journal: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(journal), "--against", "worker", "--address", "127.0.0.1:1"]) == 2
    assert "Connection refused" in capfd.readouterr().err
