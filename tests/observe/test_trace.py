"""W3C trace context: which headers are valid, and where the trace's id goes."""

from __future__ import annotations

import json
from typing import Any

import grpc.aio
import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import frontend_core
from tests.helpers.grpc_api import alphabet, ask, open_api
from tests.helpers.http_api import open_api as open_http
from triptych.config import LogConfig
from triptych.observe import logging as observe_logging
from triptych.observe.trace import current_trace, read_trace, set_trace
from triptych.rpc.channel import open_channel
from triptych.rpc.server import RpcServer
from triptych.v1 import model_pb2, model_pb2_grpc

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"  # the example of the recommendation


@pytest.mark.parametrize(
    ("parent", "trace_id"),
    [
        (PARENT, TRACE_ID),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-01-what-the-future-will-be-like", TRACE_ID),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-01", TRACE_ID),
        (f"{PARENT}-more", ""),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-01more", ""),
        (f"ff-{TRACE_ID}-00f067aa0ba902b7-01", ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE_ID}-{'0' * 16}-01", ""),
        (PARENT.upper(), ""),
        (f"{PARENT}\n", ""),
        ("", ""),
    ],
)
def test_a_parent_that_is_not_valid_counts_as_none(parent: str, trace_id: str) -> None:
    context = read_trace(parent, "vendor=1")
    assert context.trace_id == trace_id
    assert context.headers == ((("traceparent", parent), ("tracestate", "vendor=1")) if trace_id else ())


def log_as_json() -> None:
    """Called in the test itself: pytest gives each phase a stderr of its own."""
    observe_logging.configure(LogConfig(format="json"), "frontend")


def requests_in(stderr: str) -> list[dict[str, Any]]:
    """Return the log lines that name a request."""
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if "request_id" in line]


async def test_log_lines_of_a_grpc_request_carry_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json()
    async with FakeEngine(alphabet) as engine, open_api(engine) as api:
        await api.generation.Generate(ask("traced", text="Hello"), metadata=(("traceparent", PARENT),))
        await api.generation.Generate(ask("untraced", text="Hello"))
    of_requests = {line["request_id"]: line for line in requests_in(capsys.readouterr().err)}
    assert of_requests["traced"]["trace_id"] == TRACE_ID
    assert "trace_id" not in of_requests["untraced"]


async def test_log_lines_of_an_http_request_carry_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json()
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "stream": True}
    async with FakeEngine(alphabet) as engine, frontend_core(engine) as core:
        async with open_http(core.generator) as api:
            answer = await api.http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            assert answer.status_code == 200
    assert [line["trace_id"] for line in requests_in(capsys.readouterr().err)] == [TRACE_ID]


async def test_calls_made_in_turn_carry_it_on() -> None:
    received: list[dict[str, Any]] = []

    class Called(model_pb2_grpc.ModelServiceServicer):
        async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
            received.append(dict(context.invocation_metadata()))
            assert current_trace().trace_id == TRACE_ID
            return model_pb2.GetServerInfoResponse()

    server = RpcServer(services=(), limit_bytes=1 << 20)
    model_pb2_grpc.add_ModelServiceServicer_to_server(Called(), server.grpc)
    port = server.bind("127.0.0.1", 0, option="test")
    await server.start()
    try:
        set_trace([("traceparent", PARENT), ("tracestate", "vendor=1")])
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await model_pb2_grpc.ModelServiceStub(channel).GetServerInfo(model_pb2.GetServerInfoRequest())
    finally:
        await server.stop(None)
    assert (received[0]["traceparent"], received[0]["tracestate"]) == (PARENT, "vendor=1")
