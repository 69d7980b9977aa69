"""A client that goes on with a stream, at servers that do not all know how."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from triptych.client.grpc_client import GenerationClient
from triptych.errors import FeatureDisabled, GenerationLost, InvalidRequest, NotKept, TriptychError
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent
from triptych.types.outputs import FinishReason, StageTimings, Usage
from triptych.v1 import generation_pb2, generation_pb2_grpc
from triptych.wire.generation import EventEncoder

SERVICE = "triptych.v1.GenerationService"
TOKEN_IDS = [11, 12, 13]


class Breaking(generation_pb2_grpc.GenerationServiceServicer):
    """Keeps its streams, ends the first call behind one token without a word, and refuses `Attach` by an error."""

    def __init__(self, error: TriptychError) -> None:
        self.error = error
        self.requests: list[generation_pb2.StreamGenerateRequest] = []

    async def StreamGenerate(
        self, request: generation_pb2.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.StreamGenerateResponse]:
        self.requests.append(request)
        encoder = EventEncoder(request.generation.response)
        yield encoder.encode(AdmittedEvent("it", "fake", 7, [1], resume_token="kept"))[0]
        num_had = sum(len(choice.token_ids) for choice in request.generation.emitted)
        for place in range(num_had, len(TOKEN_IDS)):
            reason = FinishReason.LENGTH if place == len(TOKEN_IDS) - 1 else None
            delta = DeltaEvent(0, "x", [TOKEN_IDS[place]], finish_reason=reason)
            yield encoder.encode(delta)[0]
            if len(self.requests) == 1:
                await context.abort(grpc.StatusCode.CANCELLED)
        yield encoder.encode(FinishedEvent(Usage(1, len(TOKEN_IDS)), StageTimings()))[0]

    async def Attach(self, request: generation_pb2.AttachRequest, context: Any) -> AsyncIterator[Any]:
        raise self.error
        yield


async def read_from(servicer: Breaking) -> list[int]:
    """Return the tokens that a client gets."""
    server = RpcServer(services=[SERVICE], limit_bytes=PUBLIC_MESSAGE_BYTES)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
    port = server.bind("127.0.0.1", 0, option="port")
    await server.start()
    try:
        async with GenerationClient(f"127.0.0.1:{port}") as client:
            return [
                token_id
                async for event in client.generate([1], {"max_tokens": 3})
                if isinstance(event, DeltaEvent)
                for token_id in event.token_ids
            ]
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "error",
    [NotKept("it is over"), FeatureDisabled("GenerationService.Attach", "an older build does not serve it")],
)
async def test_a_stream_that_cannot_be_attached_to_is_sent_again_with_what_came(error: TriptychError) -> None:
    servicer = Breaking(error)
    assert await read_from(servicer) == TOKEN_IDS
    first, second = servicer.requests
    assert not first.generation.emitted
    assert [list(choice.token_ids) for choice in second.generation.emitted] == [TOKEN_IDS[:1]]
    assert second.generation.sampling.seed == 7


async def test_a_stream_that_cannot_go_on_ends_with_the_first_error_and_why_it_cannot() -> None:
    with pytest.raises(GenerationLost) as ended:
        await read_from(Breaking(InvalidRequest("resume_token", "belongs to no caller")))
    assert isinstance(ended.value.__cause__, InvalidRequest)
