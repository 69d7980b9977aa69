"""The worker's gRPC servicer: proto in, session, proto out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from triptych import failpoints
from triptych.errors import ProtocolViolation
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.observe.metrics import WorkerMetrics
from triptych.rpc.session.handshake import WORKER_PROTOCOL, Agreement, read_hello
from triptych.types.kv_transfer import KvProgress
from triptych.wire.admin import sleep_level_from_proto
from triptych.wire.kv_transfer import progress_to_proto
from triptych.wire.result import result_to_proto
from triptych.wire.worker import adapter_to_proto, worker_facts_to_proto
from triptych_services.worker.service.adapters import AdapterControl
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.session import DrainNotice, EngineHello, Grant
from triptych_services.worker.service.sleep import SleepControl
from triptych_services.worker.service.status import StatusPublisher, WorkerState
from triptych_services.worker.service.step_counter import StepCounter

log = logging.getLogger(__name__)

_HOLD_HELLO_S = 2.0
"""Seconds that an engine's hello is held while the worker is on its way to readiness."""
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `triptych.internal.v1.WorkerService`."""

    def __init__(
        self,
        lease: WorkerLease,
        sleep: SleepControl,
        adapters: AdapterControl,
        status_publisher: StatusPublisher,
        metrics: WorkerMetrics,
    ) -> None:
        self._lease = lease
        self._sleep = sleep
        self._adapters = adapters
        self._status_publisher = status_publisher
        self._metrics = metrics
        self._counter = StepCounter(metrics)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        hello = _to_hello(*await read_hello(request_iterator, WORKER_PROTOCOL))
        await self._status_publisher.wait_settled(_HOLD_HELLO_S)
        grant = self._lease.open(hello)
        session, how = grant.session, "resumed" if grant.terms.is_resumed else "connected"
        log.info("%s %s, at most %d steps in flight", session.hello, how, session.max_steps_in_flight)
        reader = asyncio.create_task(self._read_steps(request_iterator, grant), name="read-steps")
        try:
            if failpoints.ARMED:
                failpoints.reach("worker.before_welcome")
            yield worker_pb2.ExecuteResponse(welcome=_welcome(grant))
            async for outcome in grant.outcomes:
                if isinstance(outcome, DrainNotice):
                    yield worker_pb2.ExecuteResponse(draining=worker_pb2.Draining())
                    continue
                if isinstance(outcome, KvProgress):
                    yield worker_pb2.ExecuteResponse(kv_progress=progress_to_proto(outcome))
                    continue
                self._counter.count(outcome)
                if failpoints.ARMED:
                    failpoints.reach("worker.before_result")
                yield worker_pb2.ExecuteResponse(result=result_to_proto(outcome))
                if failpoints.ARMED:
                    failpoints.reach("worker.after_result")
        finally:
            reader.cancel()
            self._lease.release(grant)

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=info_to_proto(self._status_publisher.state))

    async def Sleep(
        self, request: worker_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SleepResponse:
        released_bytes = await self._sleep.fall_asleep(
            request.session_name, sleep_level_from_proto(request.level)
        )
        return worker_pb2.SleepResponse(released_bytes=released_bytes)

    async def Wake(
        self, request: worker_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WakeResponse:
        await self._sleep.wake()
        return worker_pb2.WakeResponse()

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.LoadAdapterResponse:
        facts = await self._adapters.load(request.name, request.source)
        return worker_pb2.LoadAdapterResponse(adapter=adapter_to_proto(facts))

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        await self._adapters.unload(request.digest, keeps_name=request.keeps_name)
        return worker_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: worker_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ListAdaptersResponse:
        absent = self._adapters.list_absent()
        return worker_pb2.ListAdaptersResponse(
            adapters=map(adapter_to_proto, (*self._adapters.list(), *absent)),
            absent=[facts.digest for facts in absent],
        )

    async def _read_steps(self, requests: AsyncIterator[worker_pb2.ExecuteRequest], grant: Grant) -> None:
        """Submit steps until the engine says goodbye or is gone. An error ends the stream, not the session."""
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "step":
                        grant.submit(request.step)
                        if failpoints.ARMED:
                            failpoints.reach("worker.after_step")
                        self._metrics.tokens.inc(request.step.num_tokens)
                    case "goodbye":
                        grant.leave()
                        if failpoints.ARMED:
                            failpoints.reach("worker.after_goodbye")
                    case other:
                        raise ProtocolViolation(f"expected a step, got {other}")
        except Exception as error:
            grant.end_stream(error)
        else:
            grant.end_stream(None)


def _to_hello(message: worker_pb2.Hello, agreement: Agreement) -> EngineHello:
    return EngineHello(
        engine_id=message.engine_id,
        boot_id=message.boot_id or str(message.epoch),
        fingerprint=message.fingerprint,
        shared_config=dict(message.shared_config),
        max_steps_in_flight=message.max_steps_in_flight,
        agreement=agreement,
        resume_session=message.session.resume_session,
        last_result_seen=message.session.last_received,
        last_session=message.last_session or message.session.resume_session,
    )


def _welcome(grant: Grant) -> worker_pb2.Welcome:
    session = grant.session
    return worker_pb2.Welcome(
        session=grant.terms.to_proto(),
        max_steps_in_flight=session.max_steps_in_flight,
        facts=worker_facts_to_proto(session.facts),
    )


def info_to_proto(state: WorkerState) -> worker_pb2.WorkerInfo:
    """Return the state as a message."""
    return worker_pb2.WorkerInfo(
        phase=state.phase,
        progress=state.progress,
        facts=worker_facts_to_proto(state.facts) if state.facts else None,
        held_by=state.held_by,
    )
