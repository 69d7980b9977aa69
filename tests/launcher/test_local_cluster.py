"""LocalCluster with children that do nothing but bind, live and die."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.config import EngineConfig
from triptych.errors import ConfigError, EngineUnavailable
from triptych.launcher import child
from triptych.launcher.local_cluster import LocalCluster, dial_address
from triptych.launcher.ports import with_free_ports
from triptych.launcher.process import MAX_RESTARTS, ServiceProcess

ROOT = Path(__file__).parents[2]
NAMES = ("worker", "enginecore", "frontend")
FAKES = {name: f"tests.helpers.fake_services.{name}" for name in NAMES}
TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def _fakes_are_importable(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


class Cluster(LocalCluster):
    """One of fakes, whose log is kept."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.lines: list[str] = []
        super().__init__(
            config or with_free_ports(EngineConfig()), on_log_line=self.lines.append, modules=FAKES
        )


def wait_until(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_services_get_addresses_and_leave_in_order(tmp_path):
    cluster = Cluster()
    with cluster:
        cluster.wait_bound(TIMEOUT_S)
        config, pids = cluster.config, cluster.pids
        assert list(pids) == list(NAMES)
        assert cluster.address == f"127.0.0.1:{config.frontend.port}"
        wait_until(lambda: f"enginecore calls 127.0.0.1:{config.worker.port}" in cluster.lines)
        wait_until(lambda: f"frontend calls 127.0.0.1:{config.engine.port}" in cluster.lines)
        assert list(tmp_path.iterdir()) == []  # not even a directory that a killed parent would leave
    assert [line for line in cluster.lines if "leaves" in line] == [
        "frontend leaves", "enginecore leaves", "worker leaves",
    ]  # fmt: skip
    assert not any(is_alive(pid) for pid in pids.values())
    with pytest.raises(EngineUnavailable, match="stopped"):
        cluster.check()


@pytest.mark.parametrize("victim", NAMES)
def test_a_killed_service_comes_back_on_its_ports(victim, caplog):
    with Cluster() as cluster:
        cluster.wait_bound(TIMEOUT_S)
        before, pid = cluster.config, cluster.pids[victim]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: sum(f"{victim} calls" in line for line in cluster.lines) == 2)
        assert cluster.config == before
        assert cluster.pids[victim] != pid
        cluster.check()
    assert f"{victim} (process {pid}) was killed by SIGKILL; starting it again at once (1 of 5" in caplog.text


def test_a_death_is_noticed_where_the_kernel_has_no_descriptors_of_processes(monkeypatch):
    def refuse(pid):
        raise OSError(errno.ENOSYS, "not there")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    with Cluster() as cluster:
        cluster.wait_bound(TIMEOUT_S)
        pid = cluster.pids["worker"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: sum("worker calls" in line for line in cluster.lines) == 2)
        assert cluster.pids["worker"] != pid


@pytest.mark.thorough
def test_a_service_that_keeps_dying_fails_the_cluster_and_is_named(monkeypatch):
    monkeypatch.setenv("FAKE_ENGINECORE", "exit:7")
    with Cluster() as cluster:
        with pytest.raises(
            EngineUnavailable, match=r"enginecore \(process \d+\) exited with code 7"
        ) as failed:
            cluster.wait()
        assert f"died {MAX_RESTARTS + 1} times within 60 s" in str(failed.value)
        assert "\n    enginecore meets its end" in str(failed.value)
        assert not any(is_alive(pid) for pid in cluster.pids.values())
        assert sum("enginecore calls" in line for line in cluster.lines) == MAX_RESTARTS + 1


def test_a_taken_port_is_told_in_the_services_words_and_not_tried_again():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = with_free_ports(EngineConfig())
        config = replace(config, engine=replace(config.engine, port=port))
        with Cluster(config) as cluster:
            with pytest.raises(ConfigError, match=rf"^enginecore: engine\.port: {port} is taken$"):
                cluster.wait_bound(TIMEOUT_S)
            assert sum("is taken" in line for line in cluster.lines) == 1
            assert not any(is_alive(pid) for pid in cluster.pids.values())


@pytest.mark.thorough
def test_a_service_that_does_not_leave_is_killed(monkeypatch):
    monkeypatch.setenv("FAKE_WORKER", "stay")
    with Cluster() as cluster:
        cluster.wait_bound(TIMEOUT_S)
        cluster.stop(grace_s=5.0)  # for the two that leave
        assert not any(is_alive(pid) for pid in cluster.pids.values())
    assert "worker leaves" not in cluster.lines
    assert "enginecore leaves" in cluster.lines


def test_kill_cuts_a_stop_short(monkeypatch):
    monkeypatch.setenv("FAKE_FRONTEND", "stay")
    with Cluster() as cluster:
        cluster.wait_bound(TIMEOUT_S)
        cluster.kill()
        started = time.monotonic()
        cluster.stop(grace_s=600.0)
        assert time.monotonic() - started < 300.0
        assert not any(is_alive(pid) for pid in cluster.pids.values())


def test_the_children_of_a_killed_parent_leave():
    program = (
        "import sys, time\n"
        "from triptych.launcher.ports import with_free_ports\n"
        "from triptych.launcher.local_cluster import LocalCluster\n"
        "from triptych.config import EngineConfig\n"
        f"cluster = LocalCluster(with_free_ports(EngineConfig()), modules={FAKES!r})\n"
        "cluster.start(); cluster.wait_bound(20)\n"
        "print(*cluster.pids.values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_options_reach_the_children_as_flags_and_not_by_the_environment(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_ENGINE_HOST", "no.such.host")  # the cluster's config says otherwise
    monkeypatch.setenv("TRIPTYCH_CONFIG", "/no/such/file")
    with Cluster() as cluster:
        cluster.wait_bound(TIMEOUT_S)


def test_an_orphan_ends_itself_without_a_signal(monkeypatch):
    parents, sent = iter([7, 7, 1]), []
    monkeypatch.setattr(child.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(child.os, "kill", lambda pid, signal_number: sent.append((pid, signal_number)))
    monkeypatch.setattr(child, "POLL_S", 0.0)
    child.end_with_parent(7)
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_a_child_whose_parent_is_gone_does_not_start():
    command = [sys.executable, "-m", "triptych.launcher.child", "1", FAKES["worker"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode != 0
    assert "is gone" in ended.stderr


def test_a_child_without_arguments_does_not_start():
    command = [sys.executable, "-m", "triptych.launcher.child", str(os.getpid()), FAKES["worker"]]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode != 0
    assert "has given no arguments" in ended.stderr


def test_a_service_waits_for_its_flags(monkeypatch):
    lines = []
    process = ServiceProcess(FAKES["worker"], os.environ, lines.append)
    try:
        time.sleep(0.3)
        assert (process.has_begun, process.poll(), process.read_ports()) == (False, None, None)
        process.begin(["--worker.port=0"])
        deadline = time.monotonic() + TIMEOUT_S
        while (ports := process.read_ports()) is None:
            assert process.poll() is None, lines
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.has_begun
        assert ports["port"] > 0
    finally:
        process.kill()
        while process.poll() is None:
            time.sleep(0.02)


def test_all_services_start_before_the_first_has_bound(monkeypatch, tmp_path):
    """Their modules are imported at the same time."""
    may_bind = tmp_path / "may-bind"
    monkeypatch.setenv("FAKE_WORKER", f"late:{may_bind}")
    cluster = Cluster()
    cluster.start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(cluster.pids) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert cluster.config.worker.port == 0  # not known yet
        may_bind.touch()
        cluster.wait_bound(TIMEOUT_S)
    finally:
        cluster.stop()


def test_addresses_to_dial():
    assert dial_address("0.0.0.0", 1) == "127.0.0.1:1"
    assert dial_address("::", 1) == "[::1]:1"
    assert dial_address("10.0.0.7", 1) == "10.0.0.7:1"
