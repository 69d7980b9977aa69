"""`triptych admin` against a service of the test's own."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys

import grpc
import pytest

from tests.helpers.command import exit_code
from triptych import LLM
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.errors import FeatureDisabled


def status(step: int) -> admin_pb2.EngineStatus:
    return admin_pb2.EngineStatus(
        engine_id="engine-0",
        state=admin_pb2.ENGINE_STATE_READY,
        num_running=step,
        num_waiting=2,
        num_blocks=200,
        num_used_blocks=50,
        step_ns=12_500_000,
        prefix_queries=100 * step,
        prefix_hits=25 * step,
        num_preemptions=3 * step,
        num_finished=[admin_pb2.OutcomeCount(outcome=admin_pb2.OUTCOME_STOP, count=7 * step)],
        model="m",
    )


class Service(admin_pb2_grpc.AdminServiceServicer):
    """Answers GetStatus and WatchStatus, and writes down what it was sent."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.keys: list[str] = []

    def GetStatus(self, request, context):
        self._note(request, context)
        return admin_pb2.GetStatusResponse(status=status(1))

    def WatchStatus(self, request, context):
        self._note(request, context)
        step = 0
        while context.is_active():
            step += 1
            yield admin_pb2.WatchStatusResponse(status=status(step))

    def _note(self, request, context) -> None:
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))


@pytest.fixture
def service(monkeypatch):
    served = Service()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("TRIPTYCH_ADMIN_ADDRESS", f"127.0.0.1:{port}")
    yield served
    server.stop(0).wait()


def test_status_is_text_or_json(service, capsys):
    assert exit_code("admin", "status") == 0
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line.strip()
    )
    assert (lines["state"], lines["num_finished"], lines["soft_num_blocks"]) == ("ready", "stop 7", "-")
    assert exit_code("admin", "status", "--json") == 0
    found = json.loads(capsys.readouterr().out)["status"]
    assert found.keys() == {field.name for field in admin_pb2.EngineStatus.DESCRIPTOR.fields}
    assert (found["state"], found["step_ns"], found["soft_num_blocks"]) == ("ready", 12_500_000, None)
    assert found["num_finished"] == [{"outcome": "stop", "count": 7}]


def test_watch_shows_what_changed_between_two_lines(service, capsys):
    assert exit_code("admin", "watch", "--count", "22", "--interval-s", "0.25", "--engine-id", "e") == 0
    assert (service.requests[0].interval_ms, service.requests[0].engine_id) == (250, "e")
    head, first, *more = capsys.readouterr().out.splitlines()
    assert more.pop(19) == head  # again, for those who have scrolled
    names = head.replace("step ms", "step_ms").split()
    rows = [dict(zip(names, row.split(), strict=True)) for row in (first, *more)]
    assert len(rows) == 22
    assert {row["state"] for row in rows} == {"ready"}
    assert [row["running"] for row in rows] == [str(step) for step in range(1, 23)]
    assert (rows[0]["blocks"], rows[0]["step_ms"], rows[0]["hits"]) == ("25%", "12.5", "-")
    assert {(row["hits"], row["preempted"]) for row in rows[1:]} == {("25%", "3")}


def test_watch_as_json_is_an_object_per_line(service, capsys):
    assert exit_code("admin", "watch", "--count", "3", "--json") == 0
    found = [json.loads(line)["status"]["num_running"] for line in capsys.readouterr().out.splitlines()]
    assert found == [1, 2, 3]


def test_ctrl_c_ends_watching_well(service):
    words = [sys.executable, "-m", "triptych.cli", "admin", "watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "running" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
        assert (child.returncode, err) == (0, "")


def test_the_key_may_come_from_a_file(service, tmp_path):
    file = tmp_path / "key"
    file.write_text("tk-1\n")
    assert exit_code("admin", "status", "--api-key-file", str(file)) == 0
    assert service.keys == ["Bearer tk-1"]


def test_a_public_port_is_told_from_an_admin_port(frontend, capsys):
    for action in ("engines", "watch", "sleep"):
        assert exit_code("admin", action, "--address", frontend.address) == 1
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert f"{frontend.address} does not serve this call; a frontend does on its admin port" in shown
        assert "127.0.0.1:50050" in shown


def test_a_program_that_names_the_public_port_is_told_the_same(frontend):
    with LLM(address=frontend.address, admin_address=frontend.address) as llm:
        with pytest.raises(FeatureDisabled, match=r"does not serve this call; .*frontend\.admin_port"):
            llm.sleep()


def test_what_an_engine_does_not_serve_is_one_line(service, capsys):
    assert exit_code("admin", "pause") == 1
    assert capsys.readouterr().err.count("\n") == 1
