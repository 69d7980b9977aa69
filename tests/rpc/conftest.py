"""A real server in this process, with a servicer that raises what a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES, open_channel
from triptych.rpc.server import RpcServer
from triptych.v1 import generation_pb2, generation_pb2_grpc

GENERATION = "triptych.v1.GenerationService"
ADMIN = "triptych.admin.v1.AdminService"


class RaisingAdmin(admin_pb2_grpc.AdminServiceServicer):
    """GetStatus is unary and WatchStatus a stream; both end as `behave` says."""

    def __init__(self, behave: Callable[[], Awaitable[None]]) -> None:
        self.behave = behave

    async def GetStatus(self, request, context):
        await self.behave()
        return admin_pb2.GetStatusResponse(status=admin_pb2.EngineStatus(engine_id=request.engine_id))

    async def WatchStatus(self, request, context):
        yield admin_pb2.WatchStatusResponse(status=admin_pb2.EngineStatus(engine_id="first"))
        await self.behave()
        yield admin_pb2.WatchStatusResponse(status=admin_pb2.EngineStatus(engine_id="last"))


class EchoGeneration(generation_pb2_grpc.GenerationServiceServicer):
    async def Detokenize(self, request, context):
        return generation_pb2.DetokenizeResponse(text=request.model)


@dataclass
class Running:
    server: RpcServer
    port: int
    channel: grpc.aio.Channel
    admin: admin_pb2_grpc.AdminServiceStub = field(init=False)
    generation: generation_pb2_grpc.GenerationServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)


async def do_nothing() -> None:
    return


@asynccontextmanager
async def run_server(
    behave: Callable[[], Awaitable[None]] = do_nothing, limit_bytes: int = PUBLIC_MESSAGE_BYTES
) -> AsyncIterator[Running]:
    server = RpcServer(services=[GENERATION, ADMIN], limit_bytes=limit_bytes)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(RaisingAdmin(behave), server.grpc)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(EchoGeneration(), server.grpc)
    port = server.bind("127.0.0.1", 0, option="frontend.port")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Running(server, port, channel)
    finally:
        await server.stop(0)


@pytest.fixture
def serve():
    """`async with serve(behave) as running`"""
    return run_server
