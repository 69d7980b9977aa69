"""Environments of the peers: made once, and anew after an interruption or a changed recipe."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks.harness.machine import compute_cpus
from benchmarks.harness.process_tree import descendants, runs
from benchmarks.peers import environments
from benchmarks.peers.environments import STAMP_FILE, Environment, InstallError, log_file, run_logged


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Titles of the commands that an installation would have run."""
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    titles: list[str] = []
    monkeypatch.setattr(environments, "run_logged", lambda title, *_: titles.append(title))
    return titles


def test_environment_is_installed_once(commands):
    environment = Environment("peer", ("package==1",), removed=("spoiler",))
    assert not environment.is_installed
    environment.install()
    assert environment.is_installed
    assert commands == ["peer: venv", "peer: install", "peer: uninstall"]
    environment.install()
    assert len(commands) == 3


def test_interrupted_installation_is_removed(commands):
    environment = Environment("peer", ("package==1",))
    environment.install()
    (environment.directory / STAMP_FILE).unlink()
    leftover = environment.directory / "half-unpacked"
    leftover.touch()
    environment.install()
    assert environment.is_installed
    assert not leftover.exists()


@pytest.mark.parametrize("change", [{"requirements": ("package==2",)}, {"options": ("-DX=ON",)}])
def test_changed_recipe_is_installed_anew(commands, change):
    environment = Environment("peer", ("package==1",))
    environment.install()
    assert not dataclasses.replace(environment, **change).is_installed


def test_failed_build_is_not_installed(commands):
    def fail(environment: Environment, log: Path) -> None:
        raise InstallError("no compiler")

    environment = Environment("peer", ("package==1",), build=fail)
    with pytest.raises(InstallError, match="no compiler"):
        environment.install()
    assert not environment.is_installed


def test_failed_command_names_its_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    log = log_file("peer")
    with pytest.raises(InstallError, match=rf"^compile: status 3; log: {log}$"):
        run_logged("compile", ["sh", "-c", "echo broken; exit 3"], log)
    assert "broken" in log.read_text()


def test_one_cpu_per_physical_core(tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("")
    (tmp_path / "proc/cpuinfo").write_text(
        "".join(f"processor : {cpu}\nphysical id : 0\ncore id : {cpu % 2}\n" for cpu in range(4))
    )
    assert compute_cpus(tmp_path, {0, 1, 2, 3}) == (0, 1)
    assert compute_cpus(tmp_path, {2, 3}) == (2, 3)
    assert compute_cpus(tmp_path, {1, 3}) == (1,)


def test_interrupted_command_ends_its_children(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))
    log = log_file("peer")

    def interrupt() -> None:
        while "child " not in log.read_text().partition("\n")[2]:  # behind the command itself
            time.sleep(0.01)
        time.sleep(0.3)  # an interrupt before Popen has returned finds no process to end
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt, daemon=True)
    log.touch()
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_logged("compile", ["sh", "-c", "sleep 60 & echo child $!; wait"], log)
    interrupter.join()
    (child,) = re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)
    deadline = time.monotonic() + 60
    while any(runs(process) for process in descendants([int(child)])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
