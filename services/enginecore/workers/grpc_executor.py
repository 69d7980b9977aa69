"""The step stream over gRPC: steps down and results up, several in flight, in a session that outlives the stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from triptych import failpoints
from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    ProtocolViolation,
    StaleEpoch,
    TriptychError,
    WorkerAsleep,
    WorkerHeld,
)
from triptych.internal.v1 import session_pb2, step_pb2, worker_pb2, worker_pb2_grpc
from triptych.rpc.addresses import Resolve, resolve
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, credentials_of, open_channel
from triptych.rpc.session.handshake import (
    WORKER_PROTOCOL,
    SessionTerms,
    check_kv_groups,
    check_resumed,
    end_of,
    greet,
    session_hello,
)
from triptych.rpc.session.replay_buffer import ReplayBuffer, is_repeated
from triptych.rpc.status import from_rpc_error, has_reason, is_connection_refused
from triptych.rpc.tls import ClientTls
from triptych.types.kv_transfer import KvProgress
from triptych.types.step import StepPlan, StepResult
from triptych.wire.kv_transfer import progress_from_proto
from triptych.wire.result import result_from_proto
from triptych.wire.step import StepEncoder
from triptych.wire.worker import worker_facts_from_proto
from triptych_services.enginecore.workers.base import Connected, WorkerGone, WorkerLost
from triptych_services.enginecore.workers.worker_addresses import WorkerAddresses

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 30.0  # a worker that takes no bytes for this long is gone, whatever keepalive says
_GOODBYE_TIMEOUT_S = 0.5
_LISTED_POLL_S = 0.2  # between two look-ups of a pool while its worker does not answer


class GrpcExecutor:
    """A client of `WorkerService.Execute`.

    Steps are kept until their results arrive. A resumed stream begins with those that the worker has not received.
    """

    def __init__(
        self,
        *,
        address: str,
        engine_id: str,
        boot_id: str,
        shared_config: Mapping[str, str],
        max_steps_in_flight: int,
        tls: ClientTls | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """
        Args:
            address: As `engine.worker_address`.
            boot_id: Drawn at the engine's start.
            max_steps_in_flight: What the engine wants; the worker may grant less.
            tls: None: the worker is dialed in plain text.
            resolve: Looks a name up.

        Raises:
            ConfigError: The address is none.
        """
        self._addresses = WorkerAddresses(address, resolve=resolve)
        self._tls = tls
        self._hello = worker_pb2.Hello(
            engine_id=engine_id,
            boot_id=boot_id,
            shared_config=shared_config,
            max_steps_in_flight=max_steps_in_flight,
        )
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._unwritten: deque[worker_pb2.ExecuteRequest] = deque()
        """Messages for the stream that the writer has not taken; no more steps than are in flight, and a goodbye."""
        self._has_unwritten = asyncio.Event()
        self._session_name = ""
        self._encoder = StepEncoder()
        self._steps: ReplayBuffer[step_pb2.Step] = ReplayBuffer()
        """By step id; a step is confirmed by its result."""
        self._arrived: deque[StepResult] = deque()
        self._kv_progress: KvProgress | None = None
        self._loss: WorkerLost | None = None
        self._is_draining = False
        """The worker has said that it takes no more steps."""

    async def connect(self, on_event: Callable[[], None], *, resume: bool) -> Connected:
        await self._hang_up()
        if not resume:
            self._begin_session("")
            await self._addresses.choose()
        self._channel = self._open_channel()
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Execute()
        self._hello.session.CopyFrom(
            session_hello(WORKER_PROTOCOL, self._session_name, self._steps.num_confirmed)
        )
        try:
            async with asyncio.timeout(self._addresses.answer_s):
                welcome = await self._greet_listed(self._call, resume=resume)
        except TimeoutError:
            if not resume:
                self._addresses.pass_over()
            raise EngineUnavailable(f"no welcome within {self._addresses.answer_s:g} s") from None
        except TriptychError as error:
            self._note_refusal(error, resume=resume)
            raise
        self._addresses.keep()
        terms = SessionTerms.from_proto(welcome.session, WORKER_PROTOCOL)
        facts = worker_facts_from_proto(welcome.facts)
        check_kv_groups(facts.kv, terms.agreement, other=WORKER_PROTOCOL.server)
        if terms.is_resumed:
            check_resumed(terms, self._session_name, self._steps)
        else:
            self._begin_session(terms.name)
        # The requests were tokenized for a model of this form: no other can continue them.
        self._hello.fingerprint = welcome.facts.model.fingerprint
        self._hello.last_session = terms.name
        self._loss, self._is_draining = None, False
        self._unwritten.clear()
        for step in self._steps.after(terms.last_received):
            self._write(worker_pb2.ExecuteRequest(step=step))
        self._reader = asyncio.create_task(self._read(self._call, on_event), name="read-results")
        self._writer = asyncio.create_task(self._write_to(self._call, on_event), name="write-steps")
        return Connected(
            facts,
            welcome.max_steps_in_flight,
            terms.resume_ttl_s,
            terms.is_resumed,
        )

    async def send(self, plan: StepPlan) -> None:
        step = self._encoder.encode(plan)
        self._steps.append(step)
        if self._is_draining:
            return
        if self._call is None or self._loss is not None:
            raise self._loss or WorkerLost("not connected")
        self._write(worker_pb2.ExecuteRequest(step=step))
        await asyncio.sleep(0)  # the writer begins, and the caller continues while the transport works

    def receive(self) -> list[StepResult]:
        results = list(self._arrived)
        self._arrived.clear()
        if not results and self._loss is not None:
            raise self._loss
        return results

    def take_kv_progress(self) -> KvProgress | None:
        progress, self._kv_progress = self._kv_progress, None
        return progress

    @property
    def address(self) -> str:
        return self._addresses.current

    @property
    def session_name(self) -> str:
        return self._session_name

    async def call(self, method: str, *, timeout_s: float, **fields: object) -> Any:
        if not self.address:
            raise EngineUnavailable(f"{method}: no worker of the pool has been dialed yet")
        request = getattr(worker_pb2, f"{method}Request")(**fields)
        async with self._open_channel() as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                return await getattr(stub, method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise from_rpc_error(error) from None
        raise EngineUnavailable(
            f"worker {self.address} did not answer {method} within {timeout_s:g} s; it may still carry it out"
        )

    async def close(self) -> None:
        if self._call is not None and self._loss is None and self._reader is not None:
            try:
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    self._write(worker_pb2.ExecuteRequest(goodbye=session_pb2.Goodbye()))
                    await asyncio.wait([self._reader])
            except TimeoutError:
                log.debug("the worker has not answered the goodbye")
        await self._hang_up()

    def _open_channel(self) -> grpc.aio.Channel:
        return open_channel(
            self.address, limit_bytes=INTERNAL_MESSAGE_BYTES, credentials=credentials_of(self._tls)
        )

    def _begin_session(self, name: str) -> None:
        """Forget the session before. Nothing of it will be waited for."""
        self._session_name = name
        self._encoder, self._steps = StepEncoder(), ReplayBuffer()
        self._arrived.clear()
        self._kv_progress = None

    async def _greet_listed(self, call: grpc.aio.StreamStreamCall, *, resume: bool) -> worker_pb2.Welcome:
        """Return the welcome, unless the pool loses the worker of the session first, which may not answer any more.

        Raises:
            WorkerGone: The address does not belong to the pool any more.
        """
        greeting = asyncio.ensure_future(self._greet(call))
        try:
            while not greeting.done():
                await asyncio.wait([greeting], timeout=_LISTED_POLL_S)
                if resume and not greeting.done() and not await self._addresses.is_listed(self.address):
                    self._addresses.pass_over()
                    raise WorkerGone(f"{self.address} has left the pool of workers", has_died=True)
            return await greeting
        finally:
            greeting.cancel()

    def _note_refusal(self, error: TriptychError, *, resume: bool) -> None:
        """Note that a dial has failed.

        Raises:
            WorkerGone: The worker of a pool does not have the session that was to be resumed.
        """
        if not self._addresses.is_pool or isinstance(error, WorkerAsleep):  # it sleeps for this engine
            return
        if not resume:
            self._addresses.pass_over()
            if isinstance(
                error, StaleEpoch
            ):  # one of the pool serves another engine now, which the others need not
                raise WorkerHeld(error.message) from error
        elif is_connection_refused(error.__cause__) or has_reason(error.__cause__):
            self._addresses.pass_over()
            is_held = isinstance(error, WorkerHeld | StaleEpoch)
            raise WorkerGone(f"{self.address}: {error.message}", has_died=not is_held) from error

    async def _greet(self, call: grpc.aio.StreamStreamCall) -> worker_pb2.Welcome:
        try:
            welcome = await greet(call, worker_pb2.ExecuteRequest(hello=self._hello))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if not 1 <= welcome.max_steps_in_flight <= self._hello.max_steps_in_flight:
            raise ProtocolViolation(
                f"max_steps_in_flight: worker {self.address} grants {welcome.max_steps_in_flight}, "
                f"1..{self._hello.max_steps_in_flight} was asked for"
            )
        return welcome

    def _write(self, message: worker_pb2.ExecuteRequest) -> None:
        """Have the writer write a message behind those that wait."""
        self._unwritten.append(message)
        self._has_unwritten.set()

    async def _write_to(self, call: grpc.aio.StreamStreamCall, on_event: Callable[[], None]) -> None:
        """Write what comes, in order, until the stream ends. Where it has, only the reader learns why."""
        try:
            while True:
                while self._unwritten:
                    await self._write_one(call, self._unwritten.popleft())
                self._has_unwritten.clear()
                await self._has_unwritten.wait()
        except TimeoutError:
            self._note_loss(WorkerLost(f"the worker took no step for {_SEND_TIMEOUT_S:g} s"))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("the step stream takes no more: %r", error)
        except Exception as error:
            log.error("cannot write steps: %r", error, exc_info=error)
            self._note_loss(WorkerLost(repr(error)))
        on_event()

    async def _write_one(self, call: grpc.aio.StreamStreamCall, message: worker_pb2.ExecuteRequest) -> None:
        is_step = message.HasField("step")
        if is_step and failpoints.ARMED:
            failpoints.reach("enginecore.before_step")
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await call.write(message)
        if is_step and failpoints.ARMED:
            failpoints.reach("enginecore.after_step")

    async def _read(self, call: grpc.aio.StreamStreamCall, on_event: Callable[[], None]) -> None:
        """Collect results until the stream ends, and note why it has."""
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                match response.WhichOneof("message"):
                    case "result":
                        self._take(response.result)
                    case "draining":
                        self._is_draining = True
                    case "kv_progress":
                        self._kv_progress = progress_from_proto(response.kv_progress)
                    case other:
                        raise ProtocolViolation(f"expected a result, got {other}")
                on_event()
            self._note_loss(self._loss_by(await end_of(call)))
        except grpc.aio.AioRpcError:
            self._note_loss(self._loss_by(await end_of(call)))
        except TriptychError as error:
            self._note_loss(WorkerLost(error.message))
        except Exception as error:
            log.error("cannot read the worker's results: %r", error, exc_info=error)
            self._note_loss(WorkerLost(repr(error)))
        on_event()

    def _note_loss(self, loss: WorkerLost) -> None:
        """Store why the stream ended, which the next `receive` raises. The first reason counts."""
        self._loss = self._loss or loss

    def _take(self, message: step_pb2.Result) -> None:
        """Take each result once and in order."""
        if is_repeated(message.step_id, self._steps.num_confirmed, "result of step"):
            return
        result = result_from_proto(message)
        self._steps.confirm(message.step_id)
        self._arrived.append(result)

    async def _hang_up(self) -> None:
        if self._reader is not None and self._writer is not None:
            self._reader.cancel()
            self._writer.cancel()
            await asyncio.wait([self._reader, self._writer])
            self._reader = self._writer = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _loss_by(self, error: TriptychError) -> WorkerLost:
        is_crash = isinstance(error, EngineFailure)
        return WorkerLost(error.message, is_crash=is_crash, is_orderly=self._is_draining and not is_crash)
