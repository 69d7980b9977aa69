"""Interceptors of the frontend's gRPC servers, in front of those that all servers have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import text_format
from google.protobuf.message import Message

from triptych.errors import TriptychError
from triptych.rpc.interceptors import sent_request_id
from triptych.rpc.status import to_status
from triptych_services.frontend.access.audit import log_admin_call
from triptych_services.frontend.access.caller import set_caller
from triptych_services.frontend.access.keys import ApiKeys

_FIRST_MESSAGE_S = 1.0  # for the first message of a call that is refused


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Names the caller of each call by its API key, and refuses a call without one. Health and reflection stay open.

    It wraps no handler, so that messages of a stream cost nothing.
    """

    def __init__(self, keys: ApiKeys, *, needs_admin: bool = False) -> None:
        """`needs_admin`: only keys of administrators will do."""
        self._keys = keys
        self._needs_admin = needs_admin

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not handler_call_details.method.startswith("/grpc."):
            metadata = handler_call_details.invocation_metadata
            sent = {key: value for key, value in metadata or () if isinstance(value, str)}
            try:
                set_caller(self._keys.find(sent))
                if self._needs_admin:
                    self._keys.find_admin(sent)
            except TriptychError as error:
                return _refusal(error, sent_request_id(metadata))
        return await continuation(handler_call_details)


class AuditInterceptor(grpc.aio.ServerInterceptor):
    """Writes a line to the log when a call has ended: who has called, what, and how it went.

    Belongs in front of `KeyInterceptor`, so that what that refuses has its line, too.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_audit_unary(handler.unary_unary, method), *codecs)
        wrap, inner = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
            if handler.unary_stream is not None
            else (grpc.stream_stream_rpc_method_handler, handler.stream_stream)
        )
        return wrap(_audit_stream(inner, method), *codecs)


def _audit_unary(inner: Any, method: str) -> Any:
    async def audited(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with _audit(method, request, context):
            return await inner(request, context)

    return audited


def _audit_stream(inner: Any, method: str) -> Any:
    async def audited(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with _audit(method, request, context):
            async for response in inner(request, context):
                yield response

    return audited


@contextmanager
def _audit(method: str, request: Any, context: grpc.aio.ServicerContext) -> Iterator[None]:
    peer = context.peer()  # now: a stream may be closed after gRPC has freed its call
    outcome = "OK"
    try:
        yield
    except grpc.aio.AbortError:
        outcome = _name_of(context.code())
        raise
    except (asyncio.CancelledError, GeneratorExit):
        outcome = grpc.StatusCode.CANCELLED.name
        raise
    finally:
        said = ""
        if isinstance(request, Message) and request.ByteSize():
            said = text_format.MessageToString(request, as_one_line=True)
        log_admin_call(peer, method.rpartition("/")[2], said, outcome)


def _name_of(code: Any) -> str:
    """Return the name of a status code, which gRPC holds as its number here."""
    return code.name if isinstance(code, grpc.StatusCode) else _NUMBER_TO_NAME.get(code, str(code))


_NUMBER_TO_NAME = {code.value[0]: code.name for code in grpc.StatusCode}


def _refusal(error: TriptychError, request_id: str) -> grpc.RpcMethodHandler:
    """Return a handler that ends any call with an error.

    It takes the first message before: a client of grpc.aio that writes while its call ends finds INTERNAL in place of
    the status.
    """
    status = to_status(error, request_id)

    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_MESSAGE_S):
                async for _ in requests:
                    break
        await context.abort(status.code, status.details, status.trailing_metadata)
        yield  # makes it a stream, as which a call of any kind can be ended

    return grpc.stream_stream_rpc_method_handler(refuse)
