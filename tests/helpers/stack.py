"""A real worker servicer and a real engine core in this process, over loopback gRPC, computing the naive way."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry

from tests.helpers.scheduling import BLOCK_SIZE, EOS, NAIVE_IDENTITY, VOCAB_SIZE, NaiveWorker
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.config import EngineConfig
from triptych.config.loader import shared_config
from triptych.config.step_size import size_for_device
from triptych.errors import TriptychError
from triptych.internal.v1 import engine_core_pb2, engine_core_pb2_grpc, session_pb2, worker_pb2_grpc
from triptych.observe.metrics import EngineMetrics, WorkerMetrics
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.server import RpcServer
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, Protocol, SessionTerms, session_hello
from triptych.types.facts import KvLayout, ModelFacts, Phase, SleepLevel, WorkerFacts
from triptych.types.outputs import FinishedRequest, OutputBatch, RequestFailure
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import single_choice
from triptych.wire.columns import u32_to_bytes
from triptych.wire.engine_core import (
    outputs_from_proto,
    submit_to_proto,
    welcome_from_proto,
)
from triptych_services.enginecore.frontends.servicer import ADMIN_SERVICE, AdminServicer, EngineCoreServicer
from triptych_services.enginecore.frontends.servicer import SERVICE as ENGINE_SERVICE
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor
from triptych_services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT
from triptych_services.worker.runner.base import CompletedStep, do_nothing
from triptych_services.worker.service.adapters import AdapterControl, RankAdapters
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.servicer import SERVICE as WORKER_SERVICE
from triptych_services.worker.service.servicer import WorkerServicer
from triptych_services.worker.service.sleep import SleepControl
from triptych_services.worker.service.status import StatusPublisher

PAUSED, ASLEEP = admin_pb2.ENGINE_STATE_PAUSED, admin_pb2.ENGINE_STATE_ASLEEP
DEADLINE_S = 40.0


class NaiveRunner:
    """`NaiveWorker` behind the worker's runner seam; `hold` stops it before the next step."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int = 200,
        max_model_len: int = 512,
        max_samples_per_row: int = 1,
    ) -> None:
        self.worker = NaiveWorker()
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_steps = 0
        self.level: SleepLevel | None = None
        """At which it sleeps."""
        self.sleep_error: TriptychError | None = None
        self.wake_error: TriptychError | None = None
        self.fail_at: Callable[[StepPlan], bool] = lambda plan: False
        sized = size_for_device(config.scheduler, 0)
        self.facts = WorkerFacts(
            boot_id="boot",
            model=ModelFacts(
                "naive",
                NAIVE_IDENTITY,
                VOCAB_SIZE,
                max_model_len,
                (EOS,),
                "float32",
                "float32",
                "none",
            ),
            kv=KvLayout(num_blocks, BLOCK_SIZE, 1, 1, 1, "float32"),
            max_num_seqs=sized.max_num_seqs,
            max_num_batched_tokens=sized.max_num_batched_tokens,
            max_steps_in_flight=4,
            max_samples_per_row=max_samples_per_row,
        )

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> CompletedStep:
        on_prepared()
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.level is None, "it sleeps"
        assert self.may_step.wait(DEADLINE_S), "nobody let the step go on"
        if self.fail_at(plan):
            raise RuntimeError("told to fail")
        self.num_steps += 1
        return self.worker.execute(plan)

    def reset(self) -> None:
        self.worker = NaiveWorker(groups=self.facts.kv.groups)

    def sleep(self, level: SleepLevel) -> int:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.level = level
        return level.value << 30

    def wake(self) -> None:
        if self.wake_error is not None:
            raise self.wake_error
        self.level = None


class WorkerStack:
    """One worker process's inside, without the process."""

    def __init__(self, config: EngineConfig, runner: Any) -> None:
        self.runner = runner
        self.status_publisher = StatusPublisher()
        self._server = RpcServer(services=(WORKER_SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES)

        def on_ready(_: object) -> None:
            self.status_publisher.change(phase=Phase.READY, progress=1.0, facts=runner.facts)

        self._thread = RunnerThread(
            lambda on_phase: runner,
            on_phase=lambda phase, progress: self.status_publisher.change(phase=phase, progress=progress),
            on_ready=on_ready,
        )
        self._lease = WorkerLease(
            self.status_publisher,
            self._thread,
            shared_config(config),
            resume_ttl_s=config.engine.resume_ttl_s,
        )
        sleep = SleepControl(
            self._lease, self._thread, self.status_publisher, set_ready=self._server.set_ready
        )
        adapters = AdapterControl(RankAdapters(config, lambda: runner, self._thread))
        servicer = WorkerServicer(
            self._lease, sleep, adapters, self.status_publisher, WorkerMetrics.create(CollectorRegistry())
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server.grpc)
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self.port = self._server.bind("127.0.0.1", port, option="worker.port")
        await self._server.start()
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        return self._lease.num_in_flight

    def drain(self) -> None:
        """As the app does on SIGTERM."""
        self.status_publisher.change(phase=Phase.DRAINING, progress=0.0)
        self._lease.drain()

    async def stop(self, grace_s: float = 0.0) -> None:
        await self._server.stop(grace_s)
        if isinstance(self.runner, NaiveRunner):
            self.runner.may_step.set()
        await self._thread.stop(DEADLINE_S)


def make_executor(
    port: int,
    config: EngineConfig,
    *,
    engine_id: str = "engine-0",
    boot_id: str,
    shared: dict[str, str] | None = None,
    max_steps_in_flight: int = 2,
) -> GrpcExecutor:
    """Return the executor of an engine beside the stack's, for the worker at a port of this machine.

    Args:
        shared: Options that both tiers must have alike; None: those of the config.
    """
    return GrpcExecutor(
        address=f"127.0.0.1:{port}",
        engine_id=engine_id,
        boot_id=boot_id,
        shared_config=shared_config(config) if shared is None else shared,
        max_steps_in_flight=max_steps_in_flight,
    )


class EngineStack:
    """One engine core process's inside, without the process."""

    def __init__(self, config: EngineConfig, port: int = 0) -> None:
        """`port`: of the engine; 0: any free one."""
        self._server = RpcServer(services=(ENGINE_SERVICE, ADMIN_SERVICE), limit_bytes=INTERNAL_MESSAGE_BYTES)
        self.loop = EngineLoop(
            config=config,
            executor=GrpcExecutor(
                address=config.engine.worker_address,
                engine_id=config.engine.engine_id,
                boot_id=uuid.uuid4().hex,
                shared_config=shared_config(config),
                max_steps_in_flight=config.scheduler.steps_in_flight or MAX_STEPS_IN_FLIGHT,
            ),
            metrics=EngineMetrics.create(CollectorRegistry()),
            on_ready_change=lambda ready: None,
        )
        self.servicer = EngineCoreServicer(self.loop, resume_ttl_s=config.engine.resume_ttl_s)
        engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self.servicer, self._server.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.loop), self._server.grpc)
        self.address = f"127.0.0.1:{self._server.bind('127.0.0.1', port, option='engine.port')}"

    async def start(self) -> None:
        await self._server.start()
        self.task = asyncio.create_task(self.loop.run())

    async def stop(self) -> None:
        await self._server.stop(0)
        self.servicer.close()
        self.task.cancel()
        await asyncio.wait([self.task])

    async def kill(self) -> None:
        """End as a process does that is killed: streams break without a word, and nobody listens any more."""
        self.task.cancel()
        await self._server.stop(None)
        await asyncio.wait([self.task])


class FakeFrontend:
    """One Connect stream, with everything that came down it."""

    def __init__(
        self, address: str, *, frontend_id: str = "", boot_id: str = "", protocol: Protocol = ENGINE_PROTOCOL
    ) -> None:
        """Another frontend than all others, unless it is given names."""
        self._protocol = protocol
        self._boot_id = boot_id or uuid.uuid4().hex
        self._frontend_id = frontend_id or self._boot_id
        self._channel = open_channel(address, limit_bytes=INTERNAL_MESSAGE_BYTES)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedRequest | RequestFailure] = {}
        self.batches: list[OutputBatch] = []
        self.welcomes: list[Any] = []
        self.terms: SessionTerms
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()
        """gRPC refuses a write while another one waits."""

    async def start(self, *, resume_session: str = "", last_batch_seen: int = 0) -> None:
        self._call = engine_core_pb2_grpc.EngineCoreServiceStub(self._channel).Connect()
        hello = engine_core_pb2.ConnectHello(
            session=session_hello(self._protocol, resume_session, last_batch_seen),
            frontend_id=self._frontend_id,
            boot_id=self._boot_id,
        )
        await self.send(engine_core_pb2.ConnectRequest(hello=hello))
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "welcome":
                if message.welcome.HasField("session"):
                    self.terms = SessionTerms.from_proto(message.welcome.session, self._protocol)
                self.welcomes.append(welcome_from_proto(message.welcome))
            else:
                self._note(outputs_from_proto(message.outputs))
            self._news.set()

    def _note(self, batch: OutputBatch) -> None:
        self.batches.append(batch)
        for number, token in zip(batch.owners.tolist(), batch.token_ids.tolist(), strict=True):
            assert number not in self.ends, "a token after the end"
            self.tokens.setdefault(number, []).append(token)
        for end in (*batch.finished, *batch.failures):
            assert end.number not in self.ends, "a second end"
            self.ends[end.number] = end

    async def send(self, message: engine_core_pb2.ConnectRequest) -> None:
        async with self._writing:
            await self._call.write(message)

    async def ended(self) -> None:
        """Until the stream has ended; raises its status if that is an error."""
        await self._reader

    async def submit(self, number: int, prompt: Sequence[int], **fields: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": 16, **fields.pop("sampling", {})})
        request = single_choice(
            number,
            fields.pop("request_id", f"r{number}"),
            prompt,
            sampling,
            seed=fields.pop("seed", number),
            **fields,
        )
        batch = engine_core_pb2.SubmitBatch(requests=[submit_to_proto(request)])
        await self.send(engine_core_pb2.ConnectRequest(submit=batch))

    async def abort(self, *numbers: int) -> None:
        await self.send(engine_core_pb2.ConnectRequest(abort=u32_to_bytes(np.array(numbers, np.uint32))))

    async def status(self) -> admin_pb2.EngineStatus:
        return (await self.admin.GetStatus(admin_pb2.GetStatusRequest())).status

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; it is looked at after each message."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def wait_status(self, condition: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(status := await self.status()):
                await asyncio.sleep(0.01)
        return status

    async def wait_ready(self) -> None:
        await self.wait_for(lambda: bool(self.welcomes) and self.welcomes[-1].ready)

    async def stop(self) -> None:
        """Leave in order, if the stream still stands: the engine aborts what is left."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended
            await self.send(engine_core_pb2.ConnectRequest(goodbye=session_pb2.Goodbye()))
            await asyncio.wait([self._reader], timeout=DEADLINE_S)
        self.vanish()
        await self._channel.close()

    def vanish(self) -> None:
        """Break the stream: the engine hears nothing more, and keeps what was submitted for a while."""
        self._reader.cancel()
        self._call.cancel()


def make_config(worker_port: int = 0, **scheduler: Any) -> EngineConfig:
    config = EngineConfig()
    return replace(
        config,
        scheduler=replace(config.scheduler, **scheduler),
        engine=replace(config.engine, engine_id="engine-0", worker_address=f"127.0.0.1:{worker_port}"),
    )


@asynccontextmanager
async def running_stack(
    num_blocks: int = 200, max_samples_per_row: int = 1, resume_ttl_s: float = 10.0, **scheduler: Any
) -> AsyncIterator[tuple[WorkerStack, EngineStack, FakeFrontend]]:
    """A worker, an engine and a frontend that are connected and ready."""
    config = make_config(**scheduler)
    config = replace(config, engine=replace(config.engine, resume_ttl_s=resume_ttl_s))
    worker = WorkerStack(config, NaiveRunner(config, num_blocks, max_samples_per_row=max_samples_per_row))
    await worker.start()
    engine = EngineStack(make_config(worker.port, **scheduler))
    await engine.start()
    frontend = FakeFrontend(engine.address)
    await frontend.start()
    try:
        await frontend.wait_ready()
        yield worker, engine, frontend
    finally:
        await frontend.stop()
        await engine.stop()
        await worker.stop()


def num_finished(status: admin_pb2.EngineStatus, reason: str) -> int:
    """Return how many requests have ended so: stop, length, abort or error."""
    outcome = admin_pb2.Outcome.Value(f"OUTCOME_{reason.upper()}")
    return sum(entry.count for entry in status.num_finished if entry.outcome == outcome)
