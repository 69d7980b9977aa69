"""The step stream over gRPC: hello and welcome, then steps down and results up, pipelined."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping

import grpc
import grpc.aio

from services.enginecore.executor.base import Connected, WorkerLost
from triptych.errors import EngineUnavailable, ProtocolViolation, TriptychError
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.status import from_rpc_error
from triptych.types.step import StepPlan, StepResult
from triptych.wire.worker import (
    PROTOCOL_VERSION,
    plan_to_proto,
    result_from_proto,
    worker_facts_from_proto,
)

log = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 30.0  # a worker that takes no bytes for so long is gone, whatever keepalive thinks


class GrpcExecutor:
    """A client of `WorkerService.Execute`."""

    def __init__(
        self,
        *,
        address: str,
        engine_id: str,
        epoch: int,
        shared_config: Mapping[str, str],
        window: int,
    ) -> None:
        self._address = address
        self._hello = worker_pb2.Hello(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            engine_id=engine_id,
            epoch=epoch,
            shared_config=shared_config,
            window=window,
        )
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._arrived: deque[StepResult] = deque()
        self._why_lost: str | None = None

    async def connect(self, on_event: Callable[[], None]) -> Connected:
        await self.close()
        self._arrived.clear()
        self._why_lost = None
        self._channel = open_channel(self._address, limit_bytes=INTERNAL_MESSAGE_BYTES)
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Execute()
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await self._call.write(worker_pb2.ExecuteRequest(hello=self._hello))
                first = await self._call.read()
        except TimeoutError:
            raise EngineUnavailable(
                f"worker {self._address} sent no welcome within {_WELCOME_TIMEOUT_S:g} s"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._refusal(error) from None
        if first is grpc.aio.EOF:
            raise await self._refusal(None)
        if first.WhichOneof("message") != "welcome":
            raise ProtocolViolation(f"worker {self._address} answered hello with no welcome")
        welcome = first.welcome
        if not 1 <= welcome.window <= self._hello.window:
            raise ProtocolViolation(
                f"worker {self._address} grants a window of {welcome.window}, 1..{self._hello.window} was asked"
            )
        # What is on its way was tokenized for this model and begun by it; no other may go on with it.
        self._hello.fingerprint = welcome.facts.model.fingerprint
        self._reader = asyncio.create_task(self._read(self._call, on_event), name="read-results")
        return Connected(worker_facts_from_proto(welcome.facts), welcome.window)

    async def send(self, plan: StepPlan) -> None:
        if self._call is None or self._why_lost is not None:
            raise WorkerLost(self._why_lost or "not connected")
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await self._call.write(worker_pb2.ExecuteRequest(step=plan_to_proto(plan)))
        except TimeoutError:
            raise WorkerLost(f"the worker took no step for {_SEND_TIMEOUT_S:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkerLost((await self._refusal(error)).message) from None

    def receive(self) -> list[StepResult]:
        results = list(self._arrived)
        self._arrived.clear()
        if not results and self._why_lost is not None:
            raise WorkerLost(self._why_lost)
        return results

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _read(self, call: grpc.aio.StreamStreamCall, on_event: Callable[[], None]) -> None:
        """Collect results until the stream ends, for whatever reason."""
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                if (kind := response.WhichOneof("message")) != "result":
                    raise ProtocolViolation(f"expected a result, got {kind}")
                self._arrived.append(result_from_proto(response.result))
                on_event()
            self._why_lost = (await self._refusal(None)).message
        except grpc.aio.AioRpcError as error:
            self._why_lost = from_rpc_error(error).message
        except TriptychError as error:
            self._why_lost = error.message
        except Exception as error:
            log.error("cannot read the worker's results: %r", error, exc_info=error)
            self._why_lost = repr(error)
        on_event()

    async def _refusal(self, error: BaseException | None) -> TriptychError:
        """The status that ended the call, as a typed error."""
        if isinstance(error, grpc.aio.AioRpcError):
            return from_rpc_error(error)
        assert self._call is not None
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return EngineUnavailable(f"worker {self._address} closed the stream")
        metadata = await self._call.trailing_metadata()
        initial = await self._call.initial_metadata()
        return from_rpc_error(grpc.aio.AioRpcError(code, initial, metadata, details))
