"""`triptych replay`: what it starts, and what it passes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.journals import RecordedRun, doctor
from triptych.client.cli import main
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
    assert main(["replay", str(journal)]) == 0
    assert capfd.readouterr().out.startswith("12 steps, 1 requests: no divergence")


def test_a_divergence_is_printed_and_exits_with_1(journal: Path, capfd: pytest.CaptureFixture[str]) -> None:
    doctor(journal, lambda events: [event for event in events if not isinstance(event.what, Submitted)])
    assert main(["replay", str(journal)]) == 1
    assert "is not what it was" in capfd.readouterr().out


@pytest.mark.parametrize("against", ["scheduler", "worker"])
def test_no_journal_is_one_line_and_exits_with_2(
    against: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "absent"), "--against", against]) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert "absent: No such file or directory" in shown


def test_an_address_without_a_worker_to_run_against_is_wrong_usage(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(journal), "--address", "127.0.0.1:1"]) == 2
    assert "--address: names a worker" in capsys.readouterr().err


def test_nobody_at_the_workers_address_exits_with_2(journal: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal), "--against", "worker", "--address", "127.0.0.1:1"]) == 2
    assert "Connection refused" in capfd.readouterr().err


def test_ctrl_c_ends_the_command_and_what_it_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.journal")  # nobody ever writes into it
    command = [sys.executable, "-m", "triptych.client.cli", "replay", str(tmp_path / "endless.journal")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        deadline = time.monotonic() + 20
        while len(_group(child.pid)) < 2:
            assert time.monotonic() < deadline, "nothing was started"
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(20) == 130
    assert not _group(child.pid)


def _group(group: int) -> list[int]:
    """Living processes of a process group."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            pids.append(int(stat.parent.name))
    return pids
