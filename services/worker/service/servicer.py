"""The worker's gRPC door: proto in, session, proto out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from services.worker.service.hello import EngineHello
from services.worker.service.lease import Entry, WorkerLease
from services.worker.service.session import DrainNotice, StepStream
from services.worker.service.sleep import SleepControl
from services.worker.service.status import StatusPublisher, WorkerState
from triptych.errors import ProtocolViolation
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.observe.metrics import WorkerMetrics
from triptych.types.step import StepResult
from triptych.wire.admin import sleep_level
from triptych.wire.worker import (
    PROTOCOL_VERSION,
    result_to_proto,
    worker_facts_to_proto,
)

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_HELLO_TIMEOUT_S = 10.0  # a peer that opens the stream and says nothing


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `triptych.internal.v1.WorkerService`."""

    def __init__(
        self,
        lease: WorkerLease,
        sleep: SleepControl,
        status_publisher: StatusPublisher,
        metrics: WorkerMetrics,
    ) -> None:
        self._lease = lease
        self._sleep = sleep
        self._status_publisher = status_publisher
        self._metrics = metrics

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        hello = await _read_hello(request_iterator)
        entry = self._lease.open(hello)
        how = "resumed" if entry.is_resumed else "connected"
        log.info("%s %s, window %d", hello, how, entry.session.steps_in_flight)
        welcome = _welcome(entry, self._lease.resume_ttl_s)  # before any step of this stream counts
        reader = asyncio.create_task(self._read_steps(request_iterator, entry.stream), name="read-steps")
        try:
            yield worker_pb2.ExecuteResponse(welcome=welcome)
            while (outcome := await entry.stream.next_outcome()) is not None:
                if isinstance(outcome, DrainNotice):
                    yield worker_pb2.ExecuteResponse(draining=worker_pb2.Draining())
                    continue
                self._count(outcome)
                yield worker_pb2.ExecuteResponse(result=result_to_proto(outcome))
        finally:
            reader.cancel()
            self._lease.leave(entry)

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=_info(self._status_publisher.state))

    async def WatchInfo(
        self, request: worker_pb2.WatchInfoRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchInfoResponse]:
        async for state in self._status_publisher.watch():
            yield worker_pb2.WatchInfoResponse(info=_info(state))

    async def Sleep(
        self, request: worker_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SleepResponse:
        released_bytes = await self._sleep.fall_asleep(request.session_name, sleep_level(request.level))
        return worker_pb2.SleepResponse(released_bytes=released_bytes)

    async def Wake(
        self, request: worker_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WakeResponse:
        await self._sleep.wake()
        return worker_pb2.WakeResponse()

    async def _read_steps(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], stream: StepStream
    ) -> None:
        """Submit steps until the engine says goodbye or is gone; what goes wrong ends the stream's results."""
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "step":
                        stream.submit(request.step)
                        self._metrics.tokens.inc(request.step.num_tokens)
                    case "goodbye":
                        stream.leave()
                    case other:
                        raise ProtocolViolation(f"expected a step, got {other}")
        except Exception as error:
            stream.end(error)
        else:
            stream.end(None)

    def _count(self, result: StepResult) -> None:
        timings, stage = result.timings, self._metrics.stage_seconds
        self._metrics.steps.inc()
        stage.labels("prepare").inc(timings.prepare_ns / 1e9)
        stage.labels("forward").inc(timings.forward_ns / 1e9)
        stage.labels("sample").inc(timings.sample_ns / 1e9)
        stage.labels("idle").inc(timings.idle_ns / 1e9)
        if timings.gap_ns:
            self._metrics.step_gap_seconds.observe(timings.gap_ns / 1e9)


async def _read_hello(requests: AsyncIterator[worker_pb2.ExecuteRequest]) -> EngineHello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolViolation(f"no hello within {_HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first message must be a hello")
    hello = first.hello
    return EngineHello(
        engine_id=hello.engine_id,
        epoch=hello.epoch,
        min_protocol=hello.min_protocol,
        max_protocol=hello.max_protocol,
        fingerprint=hello.fingerprint,
        shared_config=dict(hello.shared_config),
        steps_in_flight=hello.steps_in_flight,
        resume_session=hello.resume_session,
        last_result_seen=hello.last_result_seen,
    )


def _welcome(entry: Entry, resume_ttl_s: float) -> worker_pb2.Welcome:
    session, state = entry.session, entry.session.state
    kind = worker_pb2.SESSION_KIND_RESUMED if entry.is_resumed else worker_pb2.SESSION_KIND_FRESH
    return worker_pb2.Welcome(
        protocol=PROTOCOL_VERSION,
        boot_id=session.facts.boot_id,
        session=kind,
        last_step_received=state.last_step_received,
        last_step_completed=state.last_step_completed,
        steps_in_flight=session.steps_in_flight,
        facts=worker_facts_to_proto(session.facts),
        session_name=session.name,
        resume_ttl_ms=round(resume_ttl_s * 1000),
    )


def _info(state: WorkerState) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        phase=state.phase,
        progress=state.progress,
        facts=worker_facts_to_proto(state.facts) if state.facts else None,
        held_by=state.held_by,
    )
