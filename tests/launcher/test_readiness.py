"""Reported progress of a starting stack."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest

from tests.helpers.fake_frontend import FakeFrontend
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.launcher.readiness import Progress, ReadinessProbe

NOBODY = "127.0.0.1:1"


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers GetInfo alone."""

    def __init__(self) -> None:
        self.info = worker_pb2.WorkerInfo(phase="starting")
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def GetInfo(self, request, context):
        return worker_pb2.GetInfoResponse(info=self.info)

    def stop(self) -> None:
        self._server.stop(None)


@pytest.fixture
def worker():
    fake = FakeWorker()
    yield fake
    fake.stop()


def test_progress_follows_the_worker_then_waits_for_the_tiers_above(worker):
    with ReadinessProbe(NOBODY, worker.address) as probe:
        assert str(probe.progress()) == "starting"
        worker.info.phase, worker.info.progress = "loading", 0.43
        assert str(probe.progress()) == "loading 43%"
        worker.info.phase, worker.info.progress = "ready", 1.0
        assert probe.progress() == Progress("connecting")


def test_ready_is_what_the_frontend_says(worker):
    with FakeFrontend() as frontend, ReadinessProbe(frontend.address, worker.address) as probe:
        assert probe.is_ready()
        frontend.set_ready(False)
        assert not probe.is_ready()


def test_nobody_there_is_not_ready_and_no_error():
    with ReadinessProbe(NOBODY, NOBODY) as probe:
        assert not probe.is_ready()
        assert str(probe.progress()) == "starting"
