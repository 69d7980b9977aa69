"""Interceptors: what every call passes through, at either end of a channel.

`server_interceptors` and `CLIENT_INTERCEPTORS` list them. Every server and every channel takes all of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from triptych.errors import InvalidRequest, TriptychError
from triptych.observe.trace import current_trace, set_trace
from triptych.rpc.status import internal_status, to_status

log = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
"""Metadata of a call, both ways: the name of its request in the logs."""
_MAX_REQUEST_ID_CHARS = 128
_MAX_OPEN_BYTES = 64 << 10
"""Bytes of a message to health or reflection, for which anybody may ask: 16 MiB took 90 ms to read."""

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    """Return a UUIDv7, which sorts by the time of its birth (RFC 9562, section 5.7)."""
    unix_ms = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10), "big")
    number = (unix_ms & ((1 << 48) - 1)) << 80 | random_bits
    number = number & ~(0xF << 76) | 0x7 << 76  # version
    number = number & ~(0x3 << 62) | 0x2 << 62  # variant
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def set_request_id(request_id: str) -> None:
    """Name the request of the call that runs now, for its answer, and for the log line and status of its error.

    A name that metadata cannot carry is not taken: the call keeps the one that it has.
    """
    if request_id.isascii() and request_id.isprintable() and len(request_id) <= _MAX_REQUEST_ID_CHARS:
        _request_id.set(request_id)  # each call runs in a task of its own, and so in a context of its own


def current_request_id() -> str:
    """Return the name of the request of the call that runs now. Empty: none does."""
    return _request_id.get()


def sent_request_id(metadata: Sequence[tuple[str, Any]] | None) -> str:
    """Return the name that a client has given its request, cut to 128 characters. Empty: it has given none."""
    return next(
        (str(value)[:_MAX_REQUEST_ID_CHARS] for key, value in metadata or () if key == REQUEST_ID_KEY), ""
    )


CheckPeer = Callable[[grpc.aio.ServicerContext], None]


def _admit(context: grpc.aio.ServicerContext) -> None:
    """Let every client call."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Names each call by a request id, and turns what its handler raises into a status with details.

    The id is the client's, or a new one that the handler may replace by `set_request_id`. It is answered in the initial
    metadata, or with the error in the trailing metadata, and is in the log line of an INTERNAL error. Naming and errors
    are one interceptor because each interceptor costs every message of a stream some time. A trace context in the
    metadata is taken over (`triptych.observe.trace`).

    Handlers of streams must be async generators: gRPC's context.write leaves no place to catch in.
    """

    def __init__(self, check_peer: CheckPeer | None = None) -> None:
        """`check_peer`: Raises if a client may not call. None: each may."""
        self._check_peer = check_peer or _admit
        self._method_to_handlers: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}
        """Each method that was called -> its handler and that in its place. There are no more than methods served."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        handlers = self._method_to_handlers.get(method)
        if handlers is None or handlers[0] is not handler:
            handlers = self._method_to_handlers[method] = handler, self._guard(handler, method)
        return handlers[1]

    def _guard(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        """Return the handler that takes the place of a method's own in all its calls."""
        if method.startswith("/grpc."):  # health and reflection speak for themselves
            return _with_limit(handler, method)
        deserialize = handler.request_deserializer
        if deserialize is not None:
            reader = _StreamReader if handler.request_streaming else _Reader
            deserialize = reader(deserialize, method)
        codecs = (deserialize, handler.response_serializer)
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrap = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            return wrap(_guard_stream(inner, method, self._check_peer), *codecs)
        if handler.request_streaming:
            raise TypeError(f"{method}: client-streaming methods are not used in Triptych")
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary, method, self._check_peer), *codecs
        )


class RequestIdInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Passes the request id and the trace of the call that runs now on to the server that it calls in turn."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        request_id = current_request_id()
        passed_on = (*(((REQUEST_ID_KEY, request_id),) if request_id else ()), *current_trace().headers)
        if passed_on:
            metadata = client_call_details.metadata or grpc.aio.Metadata()
            for key, value in passed_on:
                metadata.add(key, value)
            client_call_details = client_call_details._replace(metadata=metadata)
        return await continuation(client_call_details, request)


def server_interceptors(check_peer: CheckPeer | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Return the interceptors of every server, outermost first. The frontend's own come before them."""
    return (CallInterceptor(check_peer),)


CLIENT_INTERCEPTORS: tuple[grpc.aio.ClientInterceptor, ...] = (RequestIdInterceptor(),)
"""Interceptors of every asyncio channel. gRPC applies each to one kind of call, none to the long-lived streams."""


class _StreamReader:
    """Reads the messages of a stream. gRPC itself would call one that cannot be read an error of the server.

    A deserializer may raise InvalidRequest, too.
    """

    def __init__(self, deserialize: Callable[[bytes], Any], method: str) -> None:
        self._deserialize = deserialize
        self._method = method

    def __call__(self, data: bytes) -> Any:
        """Return the message. Raise InvalidRequest, which the handler gets that asks for it, if it is none."""
        try:
            return self._deserialize(data)
        except DecodeError:
            raise unreadable(self._method) from None


class _Reader(_StreamReader):
    """Reads the only message of a call, before there is a handler that could get an error."""

    def __call__(self, data: bytes) -> Any:
        try:
            return super().__call__(data)
        except InvalidRequest as error:
            return error


class _ShortReader(_StreamReader):
    """Reads messages that are short. A handler is given the error of a longer one in its place."""

    def __call__(self, data: bytes) -> Any:
        """Return the message, or InvalidRequest."""
        if (size := len(data)) > _MAX_OPEN_BYTES:
            error = InvalidRequest(
                "", f"{size} bytes are above the limit {_MAX_OPEN_BYTES} of a message to {self._method}"
            )
            error.metadata = {"value": str(size), "limit": str(_MAX_OPEN_BYTES)}
            return error
        try:
            return super().__call__(data)
        except InvalidRequest as error:
            return error


def _with_limit(handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    """Return a handler of health or reflection that takes short messages only."""
    codecs = (_ShortReader(handler.request_deserializer, method), handler.response_serializer)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, InvalidRequest):
            await _refuse(request, context)
        return await (handler.unary_stream or handler.unary_unary)(request, context)

    async def converse(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            async for response in handler.stream_stream(_each_readable(requests), context):
                yield response
        except InvalidRequest as error:
            await _refuse(error, context)

    async def _refuse(error: InvalidRequest, context: grpc.aio.ServicerContext) -> None:
        set_request_id(new_request_id())
        await _abort(context, error, method, "")

    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(converse, *codecs)
    wrap = (
        grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
    )
    return wrap(call, *codecs)


async def _each_readable(requests: Any) -> AsyncGenerator[Any]:
    async for request in requests:
        _check_readable(request)
        yield request


def unreadable(method: str) -> InvalidRequest:
    """Return the refusal of bytes that are no request of a method."""
    return InvalidRequest("", f"the message is no request of {method}: it cannot be parsed")


def _check_readable(request: Any) -> None:
    if isinstance(request, InvalidRequest):
        raise request


def _guard_unary(inner: Any, method: str, check_peer: CheckPeer) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        metadata = context.invocation_metadata()
        sent_id = sent_request_id(metadata)
        set_request_id(sent_id or new_request_id())
        set_trace(metadata)
        try:
            check_peer(context)
            _check_readable(request)
            response = await inner(request, context)
            await context.send_initial_metadata(_answer(sent_id))
            return response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, error, method, sent_id)

    return guarded


def _guard_stream(inner: Any, method: str, check_peer: CheckPeer) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        metadata = context.invocation_metadata()
        sent_id = sent_request_id(metadata)
        set_request_id(sent_id or new_request_id())
        set_trace(metadata)
        try:
            check_peer(context)
            _check_readable(request)
            responses = inner(request, context)
            # Initial metadata goes out with the first message and no earlier: clients retry only a call without any.
            async for response in responses:
                await context.send_initial_metadata(_answer(sent_id))
                yield response
                break
            async for response in responses:
                yield response
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, error, method, sent_id)

    return guarded


def _answer(sent_id: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the call to its client: by the client's own id, or by that of the request."""
    return ((REQUEST_ID_KEY, sent_id or current_request_id()),)


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: str, sent_id: str) -> None:
    if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        # The generated base class answers for a method that a servicer does not have.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
    request_id = _request_id.get()
    what = f"{method} (request {request_id})"
    if isinstance(error, TriptychError):
        status = to_status(error, request_id)
        if status.code is grpc.StatusCode.INTERNAL:
            log.error("%s failed: %s", what, error, exc_info=error.__cause__)
    else:
        log.error("%s failed by a bug: %r", what, error, exc_info=error)
        status = internal_status(request_id)
    metadata = (*status.trailing_metadata, *_answer(sent_id))
    await context.abort(status.code, status.details, metadata)
