"""Requests above 64 kB over gRPC: they stay bytes, which a child process reads, or which are refused.

Protobuf parses 16 MiB of empty messages in half a second, which become 750 MB; 16,384 messages of a
conversation take 0.1 s. Both hold the interpreter's lock.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from triptych.errors import DeadlineExceeded, InvalidRequest
from triptych.internal.v1 import long_request_pb2
from triptych.rpc.interceptors import unreadable
from triptych.v1 import generation_pb2
from triptych_services.frontend.grpc.convert import to_raw_request, to_tokenize_prompt
from triptych_services.frontend.requests.long_reader import LONG_REQUEST, LongReader
from triptych_services.frontend.requests.raw import RawChat, RawRequest

AnyGenerate = generation_pb2.GenerateRequest | generation_pb2.StreamGenerateRequest
AnyItem = generation_pb2.BatchGenerateRequest | long_request_pb2.LongItem
R = TypeVar("R", generation_pb2.GenerateRequest, generation_pb2.StreamGenerateRequest)
T = TypeVar("T")

_MAX_BYTES = 1 << 20
"""Bytes of a message to a method that gives no work to a child. 4,096 request ids are half of them."""
_ANSWER_FIELDS = ("response", "length")
"""Fields of a `Generation` that say how the answer is written."""


def with_long_requests(
    server: grpc.aio.Server,
    *,
    as_bytes: Collection[str] = (),
    items: Collection[str] = (),
    max_bytes: Mapping[str, int] = MappingProxyType({}),
) -> grpc.aio.Server:
    """Return what a servicer is added to in place of a server, so that long requests are not parsed.

    A method that is not named here refuses them.

    Args:
        as_bytes: Methods that are given a request above `LONG_REQUEST` as its bytes.
        items: Methods that take a stream of items, of which a long one comes as a `LongItem`.
        max_bytes: Bytes of a message to other methods, where they differ from `_MAX_BYTES`.
    """
    return cast(grpc.aio.Server, _LongRequests(server, as_bytes, items, max_bytes))


class _LongRequests:
    """Takes the place of a server while a servicer is added to it."""

    def __init__(
        self,
        server: grpc.aio.Server,
        as_bytes: Collection[str],
        items: Collection[str],
        max_bytes: Mapping[str, int],
    ) -> None:
        self._server = server
        self._as_bytes = as_bytes
        self._items = items
        self._max_bytes = max_bytes

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add nothing: the same handlers come by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        changed = {name: self._with_reader(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, changed),))

    def _with_reader(self, name: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return a method's handler with another deserializer."""
        parse: Callable[[bytes], Any] = handler.request_deserializer
        if name in self._items:
            read = functools.partial(_read_or, long_request_pb2.LongItem.FromString, parse)
            return grpc.stream_stream_rpc_method_handler(
                handler.stream_stream, read, handler.response_serializer
            )
        if name in self._as_bytes:
            read = functools.partial(_read_or, bytes, parse)
        else:
            read = functools.partial(read_small, name, self._max_bytes.get(name, _MAX_BYTES), parse)
        codecs = (read, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(handler.unary_stream, *codecs)
        return grpc.unary_unary_rpc_method_handler(handler.unary_unary, *codecs)


def _read_or(read_long: Callable[[bytes], Any], parse: Callable[[bytes], Any], data: bytes) -> Any:
    return read_long(data) if len(data) > LONG_REQUEST else parse(data)


def read_small(name: str, limit: int, parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Return a message to a method, parsed.

    Args:
        name: Name of the method.
        limit: Bytes that the message may have.

    Raises:
        InvalidRequest: It has more, and is not parsed.
    """
    if (size := len(data)) > limit:
        error = InvalidRequest("", f"{size} bytes are above the limit {limit} of a message to {name}")
        error.metadata = {"value": str(size), "limit": str(limit)}
        raise error
    return parse(data)


async def read_long(
    reader: LongReader, data: bytes, read: Callable[[bytes], T], method: str, remaining_s: float | None
) -> T:
    """Return what `read` makes of a request in a child process.

    Args:
        read: A function of a module, perhaps with arguments by `functools.partial`. It may raise DecodeError.
        method: Path of the method, for the error of bytes that are no request.
        remaining_s: As of `check_time`.

    Raises:
        TriptychError: As `LongReader.read`, and whatever `read` raises.
    """
    check_time(remaining_s)
    try:
        return await reader.read(len(data), functools.partial(read, data), deadline_s=remaining_s)
    except DecodeError:
        raise unreadable(method) from None


def check_time(remaining_s: float | None) -> None:
    """Raise DeadlineExceeded if no time is left of a call. None: it may take any."""
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed before the request was read")


def time_of_item(item: Any, remaining_s: float | None) -> float | None:
    """Return the time that an item may take, in seconds; `remaining_s` is that of its call."""
    if not item.HasField("timeout_ms"):
        return remaining_s
    timeout_s: float = item.timeout_ms / 1000
    return timeout_s if remaining_s is None else min(timeout_s, remaining_s)


def name_of(item: AnyItem) -> str:
    """Return the request id of an item of a batch. Empty: it has none yet."""
    if isinstance(item, long_request_pb2.LongItem):
        return item.request_id
    return item.request.request_id


def name_call(request: AnyGenerate, request_id: str) -> None:
    """Give a request an id, unless its client has, and let `Generate` have its choices whole."""
    request.request_id = request.request_id or request_id
    if isinstance(request, generation_pb2.GenerateRequest):
        request.generation.response.whole_choices = True


def read_generation(
    kind: type[R], request_id: str, deadline_s: float | None, data: bytes
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
