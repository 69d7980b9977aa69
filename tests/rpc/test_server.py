"""A tier's server: ports, health, reflection, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from triptych.admin.v1 import admin_pb2
from triptych.errors import ConfigError
from triptych.rpc.server import RpcServer, stop_event, write_ready_file
from triptych.v1 import generation_pb2

DEADLINE_S = 30.0
GENERATION = "triptych.v1.GenerationService"
ADMIN = "triptych.admin.v1.AdminService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(running, service: str, timeout_s: float = DEADLINE_S) -> int:
    stub = health_pb2_grpc.HealthStub(running.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)).status


# Ports


async def test_taken_port_is_an_error_that_names_option_and_address(serve):
    async with serve() as running:
        second = RpcServer(services=[], limit_bytes=1000)
        with pytest.raises(ConfigError) as caught:
            second.bind("127.0.0.1", running.port, option="worker.port")
        await second.stop(0)
        assert caught.value.message.startswith(f"worker.port: cannot bind 127.0.0.1:{running.port};")


async def test_an_address_that_is_not_ours_is_an_error():
    server = RpcServer(services=[], limit_bytes=1000)
    with pytest.raises(ConfigError, match=r"^engine\.port: cannot bind 192\.0\.2\.1:0"):
        server.bind("192.0.2.1", 0, option="engine.port")
    await server.stop(0)


async def test_calls_that_come_together_are_all_served(serve):
    """By default gRPC cancels some of more than 1,000 calls that no handler has taken yet."""
    async with serve() as running:
        checks = (check(running, "", timeout_s=120) for _ in range(2500))
        statuses = await asyncio.gather(*checks, return_exceptions=True)
    assert [status for status in statuses if status != SERVING] == []


async def test_port_0_gives_each_server_its_own_port(serve):
    async with serve() as one, serve() as other:
        assert one.port != other.port
        assert min(one.port, other.port) > 0


async def test_a_port_is_free_again_after_the_server_stopped(serve):
    async with serve() as running:
        port = running.port
    again = RpcServer(services=[], limit_bytes=1000)
    assert again.bind("127.0.0.1", port, option="frontend.port") == port
    await again.stop(0)


# Health


async def test_a_server_is_alive_from_the_start_and_ready_when_told(serve):
    async with serve() as running:
        assert [await check(running, name) for name in ("", GENERATION, ADMIN)] == [
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
        ]
        assert not running.server.is_ready
        await running.server.set_ready(True)
        assert [await check(running, name) for name in ("", GENERATION, ADMIN)] == [SERVING] * 3
        assert running.server.is_ready


async def test_losing_readiness_is_not_dying(serve):
    async with serve() as running:
        await running.server.set_ready(True)
        await running.server.set_ready(False)
        assert await check(running, GENERATION) == NOT_SERVING
        assert await check(running, "") == SERVING


async def test_a_dead_process_says_so(serve):
    async with serve() as running:
        await running.server.set_ready(True)
        await running.server.set_dead()
        assert [await check(running, name) for name in ("", GENERATION)] == [NOT_SERVING] * 2


async def test_an_unknown_service_is_not_found(serve):
    async with serve() as running:
        with pytest.raises(grpc.RpcError) as caught:
            await check(running, "triptych.v1.NoService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_sees_each_change(serve):
    async with serve() as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(
            health_pb2.HealthCheckRequest(service=GENERATION)
        )

        async def next_status():
            return (await asyncio.wait_for(watch.read(), DEADLINE_S)).status

        assert await next_status() == NOT_SERVING
        await running.server.set_ready(True)
        assert await next_status() == SERVING
        await running.server.set_ready(False)
        assert await next_status() == NOT_SERVING
        watch.cancel()


async def test_list_names_every_service(serve):
    async with serve() as running:
        await running.server.set_ready(True)
        await running.server.set_ready(False)
        stub = health_pb2_grpc.HealthStub(running.channel)
        response = await stub.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        statuses = {name: status.status for name, status in response.statuses.items()}
        assert statuses == {"": SERVING, GENERATION: NOT_SERVING, ADMIN: NOT_SERVING}


async def test_reflection_lists_the_services(serve):
    async with serve() as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=DEADLINE_S
        )
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert names >= {GENERATION, ADMIN, "grpc.health.v1.Health"}


# The end


async def test_stop_finishes_running_calls_and_refuses_new_ones(serve):
    entered, leave = asyncio.Event(), asyncio.Event()

    async def behave():
        entered.set()
        await leave.wait()

    async with serve(behave) as running:
        call = running.admin.GetStatus(admin_pb2.GetStatusRequest(engine_id="e"), timeout=DEADLINE_S)
        await asyncio.wait_for(entered.wait(), DEADLINE_S)
        stopping = asyncio.create_task(running.server.stop(DEADLINE_S))
        with pytest.raises(grpc.RpcError) as refused:
            await running.generation.Detokenize(generation_pb2.DetokenizeRequest(), timeout=DEADLINE_S)
        # gRPC says the one or the other, by whether the call or the GOAWAY was on its way first
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        leave.set()
        assert (await call).status.engine_id == "e"
        await asyncio.wait_for(stopping, DEADLINE_S)


async def test_stopping_cancels_what_outlives_the_grace(serve):
    entered = asyncio.Event()

    async def behave():
        entered.set()
        await asyncio.Event().wait()

    async with serve(behave) as running:
        call = running.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=DEADLINE_S)
        await asyncio.wait_for(entered.wait(), DEADLINE_S)
        await asyncio.wait_for(running.server.stop(0.01), DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_stop_event(number):
    loop = asyncio.get_running_loop()
    event = stop_event()
    try:
        assert not event.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(event.wait(), DEADLINE_S)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


def test_the_ready_file_holds_pid_and_ports_and_no_leftovers(tmp_path):
    write_ready_file(tmp_path / "ready.json", {"port": 1, "metrics_port": 2})
    assert json.loads((tmp_path / "ready.json").read_text()) == {
        "pid": os.getpid(),
        "port": 1,
        "metrics_port": 2,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_without_a_ready_file_nothing_is_written():
    write_ready_file(None, {"port": 1})


def test_a_ready_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--ready-file .*gone/ready\.json: cannot be written \(No such file"
    ):
        write_ready_file(tmp_path / "gone" / "ready.json", {"port": 1})


async def call(channel, method: str, data: bytes) -> None:
    if method.endswith("ServerReflectionInfo"):
        await channel.stream_stream(method)(iter([data]), timeout=DEADLINE_S).read()
    elif method.endswith("Watch"):
        await channel.unary_stream(method)(data, timeout=DEADLINE_S).read()
    else:
        await channel.unary_unary(method)(data, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_long_messages_to_health_and_reflection_are_refused(serve, method):
    async with serve() as running:
        for data, why in (
            (b"\x00" * 65537, f"65537 bytes are above the limit 65536 of a message to {method}"),
            (b"\xff", f"the message is no request of {method}: it cannot be parsed"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(running.channel, method, data)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert why in caught.value.details()
        assert await check(running, "") == SERVING
