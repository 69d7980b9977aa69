"""Requests of any content over both APIs: none is an internal error, and the next is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import grpc
import grpc.aio
import httpx
import pytest

from tests.e2e.conftest import READY_S
from tests.e2e.test_simulated_stack import FREE_PORTS
from tests.helpers.fuzz import BASES, OPERATORS_BASES, Bases, Fuzzer
from triptych.config.loader import load_config
from triptych.launcher.local_cluster import LocalCluster
from triptych.v1 import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.model  # of which the config and the tokenizer are read

ANSWER_S = 60.0
STATUSES = {200, 400, 404, 413, 429, 504}
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
NUM_AT_ONCE = 8


class Stack:
    """A simulated stack, and what its processes have said."""

    def __init__(self, cluster: LocalCluster, lines: list[str]) -> None:
        self.cluster = cluster
        self.lines = lines


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    flags = {
        "simulation.enabled": "true",
        "simulation.base_ms": "0.2",
        "model.max_model_len": "256",
        "scheduler.max_num_waiting": "200",
        "frontend.serve_admin_http": "true",
        "frontend.admin_http_port": "0",
        **FREE_PORTS,
    }
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as cluster:
        try:
            cluster.wait_ready(READY_S)
            yield Stack(cluster, lines)
        finally:
            print("\n".join(lines[-40:]))


@pytest.mark.parametrize(
    "num_requests", [pytest.param(250, id="few"), pytest.param(5000, id="many", marks=pytest.mark.slow)]
)
async def test_http_requests_are_answered_or_refused(stack: Stack, num_requests: int) -> None:
    seen = await send_all(stack, stack.cluster.http_address, num_requests, BASES)
    assert seen[200] > num_requests // 20 < seen[400], "requests of one kind alone say little"


@pytest.mark.parametrize(
    "num_requests", [pytest.param(50, id="few"), pytest.param(1000, id="many", marks=pytest.mark.slow)]
)
async def test_operators_requests_are_answered_or_refused(stack: Stack, num_requests: int) -> None:
    port = stack.cluster.config.frontend.admin_http_port
    seen = await send_all(stack, f"127.0.0.1:{port}", num_requests, OPERATORS_BASES)
    assert seen[400] > num_requests // 20


async def send_all(stack: Stack, address: str, num_requests: int, bases: Bases) -> Counter[int]:
    """Send requests that no client should send to one of the HTTP servers, and count the statuses of the answers."""
    fuzzer, seen = Fuzzer(num_requests), Counter[int]()
    places = asyncio.Semaphore(NUM_AT_ONCE)
    api = f"http://{stack.cluster.http_address}"

    async def ask(number: int, path: str, content: bytes, headers: dict[str, str]) -> None:
        async with places:
            response = await client.post(f"http://{address}{path}", content=content, headers=headers)
            what = f"request {number} to {path}: {content[:2000]!r} -> {response.status_code} {response.text[:500]}"
            assert response.status_code in STATUSES, what
            if response.status_code != 200:
                assert response.json()["error"]["message"], what
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert '"code":"internal"' not in response.text, what
            seen[response.status_code] += 1
            if number % 50 == 0:
                body = {"prompt": "Hello", "max_tokens": 2}
                served = await client.post(f"{api}/v1/completions", json=body)
                assert served.status_code == 200, f"after {what}: {served.text}"

    async with httpx.AsyncClient(timeout=ANSWER_S) as client, asyncio.TaskGroup() as tasks:
        for number in range(num_requests):
            tasks.create_task(ask(number, *fuzzer.http_request(bases)))
    print(seen)
    assert_no_bugs(stack)
    return seen


@pytest.mark.parametrize(
    "num_requests", [pytest.param(250, id="few"), pytest.param(5000, id="many", marks=pytest.mark.slow)]
)
async def test_grpc_requests_are_answered_or_refused(stack: Stack, num_requests: int) -> None:
    fuzzer, seen = Fuzzer(num_requests), Counter[grpc.StatusCode]()
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(number: int, method: str, content: bytes) -> None:
        async with places:
            code, details = await call(f"/{method}", content)
            assert code in CODES, f"request {number} to {method}: {content[:2000]!r} -> {code} {details}"
            seen[code] += 1
            if number % 50 == 0:
                request = {"generation": {"text": {"text": "Hello"}, "length": {"max_tokens": 2}}}
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.Generate(generation_pb2.GenerateRequest(**request), timeout=ANSWER_S)

    async def call(path: str, content: bytes) -> tuple[grpc.StatusCode, str]:
        try:
            if path.endswith(("StreamGenerate", "VllmEngine/Generate")):
                async for _ in channel.unary_stream(path)(content, timeout=ANSWER_S):
                    pass
            else:
                await channel.unary_unary(path)(content, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    async with grpc.aio.insecure_channel(stack.cluster.address) as channel:
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_requests):
                tasks.create_task(ask(number, *fuzzer.grpc_request()))
    print(seen)
    assert seen[grpc.StatusCode.OK] > num_requests // 20 < seen[grpc.StatusCode.INVALID_ARGUMENT]
    assert_no_bugs(stack)


def assert_no_bugs(stack: Stack) -> None:
    assert [line for line in stack.lines if "by a bug" in line or "Traceback" in line] == []
