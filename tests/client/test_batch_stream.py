"""Many requests over one stream, against servers that end it when they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.helpers.fake_frontend import SERVICE
from triptych.client import batch_stream
from triptych.client.batch_stream import BatchStream
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import DEFAULT_OPTIONS
from triptych.errors import PermissionDenied, TriptychError
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.v1 import generation_pb2_grpc

NUM_STREAMS = 150
NUM_ITEMS = 12


class Refusing(generation_pb2_grpc.GenerationServiceServicer):
    """Refuses every stream when its first message has come."""

    async def BatchGenerate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await anext(request_iterator)
        raise PermissionDenied("not for you")
        yield  # it is a generator

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise PermissionDenied("not for you")
        yield  # it is a generator


@asynccontextmanager
async def refusing_server() -> AsyncIterator[str]:
    server = RpcServer(services=[SERVICE], limit_bytes=PUBLIC_MESSAGE_BYTES)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Refusing(), server.grpc)
    port = server.bind("127.0.0.1", 0, option="port")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def errors_of(stream: BatchStream) -> set[type[TriptychError]]:
    answers = (stream.answer("a", None, DEFAULT_OPTIONS) for _ in range(NUM_ITEMS))
    found = await asyncio.gather(*answers, return_exceptions=True)
    return {type(error) for error in found}  # type: ignore[misc]


@pytest.mark.parametrize("first_answer_s", [batch_stream._FIRST_ANSWER_S, 0.0])
async def test_the_reason_of_a_refusal_is_never_lost(
    monkeypatch: pytest.MonkeyPatch, first_answer_s: float
) -> None:
    """A message written while the call ends turns it into an INTERNAL of gRPC's own, in 8 of 100 streams.

    The client waits before it writes on; on a machine that is too busy for that, each item asks again by itself.
    """
    monkeypatch.setattr(batch_stream, "_FIRST_ANSWER_S", first_answer_s)
    async with refusing_server() as address, GenerationClient(address) as client:
        for _ in range(NUM_STREAMS):
            async with client.open_batch() as stream:
                assert await errors_of(stream) == {PermissionDenied}
