"""Server interceptors: every handler's errors go through the one table; UNKNOWN never leaves a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from triptych.errors import TriptychError
from triptych.rpc.status import internal_status, to_status

log = logging.getLogger(__name__)

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_request_id(request_id: str) -> None:
    """Name the request of the call that runs now, for the log line and the status of its error."""
    _request_id.set(request_id)  # each call runs in a task of its own, and so in a context of its own


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status with details.

    Handlers of streams must be async generators: gRPC's context.write leaves no place to catch in.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):  # health and reflection speak for themselves
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrap = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            return wrap(_guard_stream(inner, method), *codecs)
        if handler.request_streaming:
            raise TypeError(f"{method}: client-streaming methods are not used in Triptych")
        return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary, method), *codecs)


def _guard_unary(inner: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, error, method)

    return guarded


def _guard_stream(inner: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            async for response in inner(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, error, method)

    return guarded


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        # The generated base class answers for a method that a door does not have.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
    request_id = _request_id.get()
    what = f"{method} (request {request_id})" if request_id else method
    if isinstance(error, TriptychError):
        status = to_status(error, request_id)
        if status.code is grpc.StatusCode.INTERNAL:
            log.error("%s failed: %s", what, error, exc_info=error.__cause__)
    else:
        log.error("%s failed by a bug: %r", what, error, exc_info=error)
        status = internal_status(request_id)
    await context.abort(status.code, status.details, status.trailing_metadata)
