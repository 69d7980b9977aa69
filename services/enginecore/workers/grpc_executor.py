"""The step stream over gRPC: hello and welcome, then steps down and results up, pipelined; resumed if it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping

import grpc
import grpc.aio

from services.enginecore.workers.base import Connected, WorkerLost
from triptych.errors import EngineFailure, EngineUnavailable, ProtocolViolation, TriptychError
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.status import from_rpc_error
from triptych.types.facts import SleepLevel
from triptych.types.step import StepPlan, StepResult
from triptych.wire.worker import (
    PROTOCOL_VERSION,
    StepEncoder,
    result_from_proto,
    worker_facts_from_proto,
)

log = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 30.0  # a worker that takes no bytes for so long is gone, whatever keepalive thinks
_GOODBYE_TIMEOUT_S = 0.5
_SLEEP_TIMEOUT_S = 600.0  # weights are copied to the host
_WAKE_TIMEOUT_S = 3600.0  # or read from the checkpoint again


class GrpcExecutor:
    """A client of `WorkerService.Execute`."""

    def __init__(
        self,
        *,
        address: str,
        engine_id: str,
        epoch: int,
        shared_config: Mapping[str, str],
        steps_in_flight: int,
    ) -> None:
        """`steps_in_flight`: steps that may be in flight at most, if the worker agrees."""
        self._address = address
        self._hello = worker_pb2.Hello(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            engine_id=engine_id,
            epoch=epoch,
            shared_config=shared_config,
            steps_in_flight=steps_in_flight,
        )
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._encoder = StepEncoder()
        self._unanswered: deque[worker_pb2.Step] = deque()  # the window at most
        self._arrived: deque[StepResult] = deque()
        self._loss: WorkerLost | None = None
        self._is_draining = False
        """The worker has said that it takes no more steps."""

    async def connect(self, on_event: Callable[[], None]) -> Connected:
        await self._hang_up()
        self._channel = open_channel(self._address, limit_bytes=INTERNAL_MESSAGE_BYTES)
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Execute()
        welcome = await self._greet(self._call)
        is_resumed = welcome.session == worker_pb2.SESSION_KIND_RESUMED
        if is_resumed:
            self._check_resumed(welcome)
        else:
            self.forget_session()
            self._hello.resume_session = welcome.session_name
        # What is on its way was tokenized for this model and begun by it; no other may go on with it.
        self._hello.fingerprint = welcome.facts.model.fingerprint
        self._loss, self._is_draining = None, False
        self._reader = asyncio.create_task(self._read(self._call, on_event), name="read-results")
        facts, resume_ttl_s = worker_facts_from_proto(welcome.facts), welcome.resume_ttl_ms / 1000
        connected = Connected(facts, welcome.steps_in_flight, resume_ttl_s, is_resumed)
        for step in [step for step in self._unanswered if step.step_id > welcome.last_step_received]:
            await self._write(step)
        return connected

    def forget_session(self) -> None:
        self._hello.resume_session = ""
        self._hello.last_result_seen = 0
        self._encoder = StepEncoder()
        self._unanswered.clear()
        self._arrived.clear()

    async def send(self, plan: StepPlan) -> None:
        step = self._encoder.encode(plan)
        self._unanswered.append(step)
        if not self._is_draining:
            await self._write(step)

    def receive(self) -> list[StepResult]:
        results = list(self._arrived)
        self._arrived.clear()
        if not results and self._loss is not None:
            raise self._loss
        return results

    async def sleep(self, level: SleepLevel) -> int:
        assert self._channel is not None, "who has no session cannot end it"
        request = worker_pb2.SleepRequest(session_name=self._hello.resume_session, level=level.value)
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
            response = await stub.Sleep(request, timeout=_SLEEP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._no_answer(error, "Sleep", _SLEEP_TIMEOUT_S) from None
        await self._hang_up()
        self.forget_session()
        return int(response.released_bytes)

    async def wake(self) -> None:
        async with open_channel(self._address, limit_bytes=INTERNAL_MESSAGE_BYTES) as channel:
            try:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                await stub.Wake(worker_pb2.WakeRequest(), timeout=_WAKE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise self._no_answer(error, "Wake", _WAKE_TIMEOUT_S) from None

    async def close(self) -> None:
        if self._call is not None and self._loss is None and self._reader is not None:
            try:
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    await self._call.write(worker_pb2.ExecuteRequest(goodbye=worker_pb2.Goodbye()))
                    await asyncio.wait([self._reader])
            except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                log.debug("the worker did not hear the goodbye: %r", error)
        await self._hang_up()

    def _no_answer(self, error: grpc.aio.AioRpcError, call: str, timeout_s: float) -> TriptychError:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return from_rpc_error(error)
        return EngineUnavailable(
            f"worker {self._address} did not answer {call} within {timeout_s:g} s; it may still carry it out, and "
            "Wake brings back one that sleeps"
        )

    async def _greet(self, call: grpc.aio.StreamStreamCall) -> worker_pb2.Welcome:
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await call.write(worker_pb2.ExecuteRequest(hello=self._hello))
                first = await call.read()
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
        if not 1 <= welcome.steps_in_flight <= self._hello.steps_in_flight:
            raise ProtocolViolation(
                f"steps_in_flight: worker {self._address} grants {welcome.steps_in_flight}, "
                f"not within 1..{self._hello.steps_in_flight}"
            )
        return welcome

    def _check_resumed(self, welcome: worker_pb2.Welcome) -> None:
        hello = self._hello
        if not hello.resume_session or welcome.session_name != hello.resume_session:
            raise ProtocolViolation(
                f"worker {self._address} resumes session {welcome.session_name!r}, {hello.resume_session!r} was asked"
            )
        last_sent = self._unanswered[-1].step_id if self._unanswered else hello.last_result_seen
        if not hello.last_result_seen <= welcome.last_step_received <= last_sent:
            raise ProtocolViolation(
                f"worker {self._address} has received step {welcome.last_step_received}, "
                f"{hello.last_result_seen}..{last_sent} were sent and not acknowledged"
            )

    async def _write(self, step: worker_pb2.Step) -> None:
        if self._call is None or self._loss is not None:
            raise self._loss or WorkerLost("not connected")
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await self._call.write(worker_pb2.ExecuteRequest(step=step))
        except TimeoutError:
            raise WorkerLost(f"the worker took no step for {_SEND_TIMEOUT_S:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._loss_by(await self._refusal(error)) from None

    async def _read(self, call: grpc.aio.StreamStreamCall, on_event: Callable[[], None]) -> None:
        """Collect results until the stream ends, for whatever reason."""
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                match response.WhichOneof("message"):
                    case "result":
                        self._take(response.result)
                    case "draining":
                        self._is_draining = True
                    case other:
                        raise ProtocolViolation(f"expected a result, got {other}")
                on_event()
            self._loss = self._loss_by(await self._refusal(None))
        except grpc.aio.AioRpcError as error:
            self._loss = self._loss_by(from_rpc_error(error))
        except TriptychError as error:
            self._loss = WorkerLost(error.message)
        except Exception as error:
            log.error("cannot read the worker's results: %r", error, exc_info=error)
            self._loss = WorkerLost(repr(error))
        on_event()

    def _take(self, message: worker_pb2.Result) -> None:
        """Each result once and in order; one that is repeated is no news."""
        last = self._hello.last_result_seen
        if message.step_id <= last:
            return
        if not self._unanswered or message.step_id != last + 1:
            raise ProtocolViolation(f"result of step {message.step_id} after that of step {last}")
        self._arrived.append(result_from_proto(message))
        self._unanswered.popleft()
        self._hello.last_result_seen = message.step_id

    async def _hang_up(self) -> None:
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

    def _loss_by(self, error: TriptychError) -> WorkerLost:
        is_crash = isinstance(error, EngineFailure)
        return WorkerLost(error.message, is_crash=is_crash, is_orderly=self._is_draining and not is_crash)
