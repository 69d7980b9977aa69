"""Requests of `GenerationService` above 256 kB: they stay bytes, which a child process reads, or which are refused.

Protobuf parses 16 MiB of empty messages in half a second, which become 750 MB; 16,384 messages of a
conversation take 0.1 s. Both hold the interpreter's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from triptych.errors import InvalidRequest
from triptych.internal.v1 import long_request_pb2
from triptych.v1 import generation_pb2, generation_pb2_grpc
from triptych_services.frontend.grpc.convert import to_raw_request, to_tokenize_prompt
from triptych_services.frontend.requests.long_reader import LONG_REQUEST
from triptych_services.frontend.requests.raw import RawChat, RawRequest

AnyGenerate = generation_pb2.GenerateRequest | generation_pb2.StreamGenerateRequest
AnyItem = generation_pb2.BatchGenerateRequest | long_request_pb2.LongBatchItem
R = TypeVar("R", generation_pb2.GenerateRequest, generation_pb2.StreamGenerateRequest)

_LONG_METHODS = ("Generate", "StreamGenerate", "Tokenize")
"""Methods that are given a request above `LONG_REQUEST` as its bytes."""
_SMALL_METHODS = ("Abort", "Attach")
_SMALL_BYTES = 1 << 20
"""As many bytes as a message of `_SMALL_METHODS` may have. 4,096 request ids are half of them."""
_ANSWER_FIELDS = ("response", "length")
"""Fields of a `Generation` that say how the answer is written."""


def add_generation_servicer(
    servicer: generation_pb2_grpc.GenerationServiceServicer, server: grpc.aio.Server
) -> None:
    """Add a servicer, with methods that take long requests as bytes."""
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, _LongRequests(server))


class _LongRequests:
    """Takes the place of a server while a servicer is added to it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add nothing: the same handlers come by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        changed = {name: _with_bytes(handlers[name]) for name in _LONG_METHODS}
        changed |= {name: _with_limit(handlers[name], name) for name in _SMALL_METHODS}
        changed["BatchGenerate"] = _with_long_items(handlers["BatchGenerate"])
        generic = grpc.method_handlers_generic_handler(service, {**handlers, **changed})
        self._server.add_generic_rpc_handlers((generic,))


def _with_bytes(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Return a handler of a unary request that is given a long one as bytes."""
    parse: Callable[[bytes], Any] = handler.request_deserializer

    def read(data: bytes) -> Any:
        return data if len(data) > LONG_REQUEST else parse(data)

    return _with_reader(handler, read)


def _with_limit(handler: grpc.RpcMethodHandler, name: str) -> grpc.RpcMethodHandler:
    """Return a handler of a unary request that refuses a long one unread."""
    parse: Callable[[bytes], Any] = handler.request_deserializer

    def read(data: bytes) -> Any:
        if (size := len(data)) > _SMALL_BYTES:
            error = InvalidRequest(
                "", f"{size} bytes are above the limit {_SMALL_BYTES} of a message to {name}"
            )
            error.metadata = {"value": str(size), "limit": str(_SMALL_BYTES)}
            raise error
        return parse(data)

    return _with_reader(handler, read)


def _with_reader(handler: grpc.RpcMethodHandler, read: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    """Return a handler of a unary request with another deserializer."""
    codecs = (read, handler.response_serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(handler.unary_stream, *codecs)
    return grpc.unary_unary_rpc_method_handler(handler.unary_unary, *codecs)


def _with_long_items(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Return a handler of a stream of items, of which a long one comes as a `LongBatchItem`."""
    parse: Callable[[bytes], Any] = handler.request_deserializer

    def read(data: bytes) -> AnyItem:
        return long_request_pb2.LongBatchItem.FromString(data) if len(data) > LONG_REQUEST else parse(data)

    return grpc.stream_stream_rpc_method_handler(handler.stream_stream, read, handler.response_serializer)


def name_of(item: AnyItem) -> str:
    """Return the request id of an item of a batch. Empty: it has none yet."""
    if isinstance(item, long_request_pb2.LongBatchItem):
        return item.request_id
    return item.request.request_id


def name_call(request: AnyGenerate, request_id: str) -> None:
    """Give a request an id, unless its client has, and let `Generate` have its choices whole."""
    request.request_id = request.request_id or request_id
    if isinstance(request, generation_pb2.GenerateRequest):
        request.generation.response.whole_choices = True


def read_generation(
    data: bytes, kind: type[R], request_id: str, deadline_s: float | None
) -> tuple[R, RawRequest]:
    """Return what is left of a request without its prompt, and what it asks for.

    Args:
        request_id: Its id where its client gives none.

    Raises:
        DecodeError: The bytes are no such request.
    """
    request = kind.FromString(data)
    name_call(request, request_id)
    raw = to_raw_request(request.request_id, request.generation, deadline_s)
    # An array has ints as entries, and is pickled as bytes.
    raw = replace(raw, emitted={index: array("I", token_ids) for index, token_ids in raw.emitted.items()})
    if request.generation.HasField("token_ids"):
        raw = replace(raw, prompt=array("I", request.generation.token_ids.ids))
    generation = generation_pb2.Generation()
    for field in _ANSWER_FIELDS:
        if request.generation.HasField(field):
            getattr(generation, field).CopyFrom(getattr(request.generation, field))
    rest = kind(request_id=request.request_id, generation=generation)
    if isinstance(request, generation_pb2.StreamGenerateRequest):
        rest.resumes = request.resumes
    rest.DiscardUnknownFields()
    return rest, raw


def read_tokenize(
    data: bytes,
) -> tuple[generation_pb2.TokenizeRequest, tuple[str | RawChat, bool | None, str]]:
    """Return what is left of a request without its prompt, and what `to_tokenize_prompt` makes of it.

    Raises:
        DecodeError: The bytes are no such request.
        InvalidRequest, FeatureDisabled: As `to_tokenize_prompt`.
    """
    request = generation_pb2.TokenizeRequest.FromString(data)
    prompt = to_tokenize_prompt(request)
    rest = generation_pb2.TokenizeRequest(
        model=request.model, with_bytes=request.with_bytes, with_offsets=request.with_offsets
    )
    return rest, prompt
