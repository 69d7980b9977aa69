"""The ground in one process and fake time: all three tiers as they are, over a network without a network.

What is not ours to test here is replaced: gRPC's transport, threads, processes, and the model, which is the naive one
that holds every rule of the step protocol and the KV cache against what it is told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.chaos.grounds.fake_time import Process, current_process, run_in_fake_time
from tests.chaos.grounds.memory_http import post
from tests.chaos.grounds.memory_network import Channel, HandlerCollector, Network
from tests.chaos.grounds.memory_transfers import MemoryTransfers, TransferNetwork
from tests.chaos.grounds.memory_worker import (
    STEP_S,
    TEXT_VOCAB_SIZE,
    InlineProcess,
    InlineRunner,
)
from tests.chaos.load import HTTP_KINDS, KINDS
from tests.chaos.recorder import Request
from tests.chaos.resuming_http import resume_over_http
from tests.chaos.scenario import Scenario, play
from tests.chaos.validators import Evidence, Home, Step, violations_of
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.scheduling import NAIVE_IDENTITY, VOCAB_SIZE
from tests.helpers.stack import NaiveRunner
from triptych import failpoints
from triptych.client import dialer as client_dialer
from triptych.client.grpc_client import GenerationClient
from triptych.config import EngineConfig
from triptych.config.fields import FrontendConfig
from triptych.config.loader import shared_config
from triptych.errors import StaleEpoch
from triptych.internal.v1 import engine_core_pb2_grpc, worker_pb2_grpc
from triptych.observe.metrics import EngineMetrics, FrontendMetrics, WorkerMetrics
from triptych.rpc import channel as rpc_channel
from triptych.rpc.service_main import STOP_GRACE_S
from triptych.types.events import Event
from triptych.types.facts import KvGroup, KvKind, KvLayout, Phase
from triptych.v1 import generation_pb2_grpc
from triptych_services.enginecore.frontends.servicer import EngineCoreServicer
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers import grpc_executor
from triptych_services.enginecore.workers.grpc_executor import GrpcExecutor
from triptych_services.enginecore.workers.steps_in_flight import MAX_STEPS_IN_FLIGHT
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.generation_servicer import GenerationServicer
from triptych_services.frontend.http.app import create_app
from triptych_services.frontend.requests.grammars import compiler as grammars
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator
from triptych_services.worker.service.adapters import AdapterControl, RankAdapters
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.servicer import WorkerServicer
from triptych_services.worker.service.session import EngineHello, Grant
from triptych_services.worker.service.sleep import SleepControl
from triptych_services.worker.service.status import StatusPublisher

PREFILL_STEP_S = 0.002
"""Seconds of a step where prompts are computed for others: blocks arrive while earlier steps are in flight."""
DRAIN_S = 30.0
FAREWELL_S = 1.0
_MAX_MODEL_LEN = 512
_FULL = KvLayout(200, 16, 1, 1, 1, "float32").groups[0]
_GROUPS = (
    _FULL, replace(_FULL, kind=KvKind.WINDOW, window=40), replace(_FULL, kind=KvKind.WINDOW, window=24),
    KvGroup(KvKind.STATE, 1, 32, 4096),
)  # fmt: skip
_MODELS = {
    "weights": (replace(NAIVE_IDENTITY, weights="v" * 64), 1),
    "numerics": (replace(NAIVE_IDENTITY, numerics="another release"), 2),
}
"""Change of a worker -> its identity from then on, and the key of its tokens."""
UNREAD_EVENTS = 16
"""Events that a client has not read, after which the frontend waits for it."""


class MemoryGround:
    """Some workers, an engine core for each, and frontends that know all engine cores; a process each, by name."""

    vocabulary = range(VOCAB_SIZE)
    max_tokens = 60
    kinds = (*KINDS, *HTTP_KINDS)
    load_s = 1.0
    is_exact_time = True
    rest_s = 3.0

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        num_engines: int,
        num_frontends: int,
        has_transfers: bool = False,
        has_groups: bool = False,
    ) -> None:
        """
        Args:
            has_transfers: Whether the first engine computes prompts for the others.
            has_groups: Whether the model has windows and states.
        """
        self._groups = _GROUPS if has_groups else ()
        self.network = Network()
        self.transfers = TransferNetwork() if has_transfers else None
        self.steps: list[Step] = []
        self.processes: dict[str, Process] = {}
        self.num_engines, self.num_frontends = num_engines, num_frontends
        self._lives: dict[str, int] = {}
        self._changes: dict[str, str] = {}
        """Process -> how it differs from the first of its name since it was replaced."""
        self._workers: dict[str, tuple[StatusPublisher, WorkerLease]] = {}
        self._engines: dict[str, EngineLoop] = {}
        self._sessions: dict[str, EngineCoreServicer] = {}
        self._generators: dict[str, Generator] = {}
        self._apps: dict[str, FastAPI] = {}
        """Frontend -> its HTTP API."""
        self._clients: dict[str, list[EngineClient]] = {}
        self.bugs: list[str] = []
        self._client = Process("client")
        self._armed: dict[str, str] = {}
        """Process -> the failpoint at which it is killed."""
        self.reached: set[str] = set()
        """Failpoints at which one was killed."""
        monkeypatch.setattr(grammars, "LimitedProcess", InlineProcess)
        monkeypatch.setattr(failpoints, "ARMED", True)
        monkeypatch.setattr(failpoints, "reach", self._reach)
        for module in (rpc_channel, grpc_executor, client_dialer):
            monkeypatch.setattr(module, "open_channel", self._open_channel)

    @property
    def names(self) -> list[str]:
        """Names of all processes, in the order of starting."""
        kinds = (
            ("worker", self.num_engines),
            ("enginecore", self.num_engines),
            ("frontend", self.num_frontends),
        )
        return [f"{kind}-{index}" for kind, number in kinds for index in range(number)]

    @property
    def links(self) -> list[tuple[str, str]]:
        """Pairs of a client and the server that it dials."""
        own = [(f"enginecore-{index}", f"worker-{index}") for index in range(self.num_engines)]
        return own + [
            (f"frontend-{index}", f"enginecore-{engine}")
            for index in range(self.num_frontends)
            for engine in range(self.num_engines)
        ]

    async def start_all(self) -> None:
        for name in self.names:
            await self.start(name)
        await self.wait_all_ready()

    async def wait_all_ready(self) -> None:
        """Return when every frontend has all engine cores."""
        async with asyncio.timeout(60):
            while not all(client.is_ready for clients in self._clients.values() for client in clients):
                await asyncio.sleep(0.01)

    async def start(self, name: str) -> None:
        """Start a process, again if it has died. It takes no time."""
        if name in self.processes and not self.processes[name].is_dead:
            return
        await self._begin(name)

    async def _begin(self, name: str) -> None:
        process = self.processes[name] = Process(name)
        self._lives[name] = self._lives.get(name, 0) + 1
        kind, _, index = name.partition("-")
        with process.running():
            match kind:
                case "worker":
                    self._start_worker(name)
                case "enginecore":
                    self._start_engine(name, int(index))
                case "frontend":
                    self._start_frontend(name)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        if not process.is_dead:
            process.kill()
            self.network.drop_process(process)

    async def kill_at(self, name: str, place: str, within_s: float) -> None:
        """Kill a process when it comes to a failpoint. Return when that has happened, or after so many seconds."""
        self._armed[name] = place
        until = asyncio.get_running_loop().time() + within_s
        while name in self._armed and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        self._armed.pop(name, None)

    def _reach(self, place: str) -> None:
        process = current_process()
        if process is not None and self._armed.get(process.name) == place and not process.is_dead:
            del self._armed[process.name]
            self.reached.add(place)
            self.kill(process.name)
            raise asyncio.CancelledError

    async def term(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Let a process drain and end, in the order of its app: what it serves, then what runs in the background."""
        process = self.processes[name]
        if process.is_dead:
            return
        with process.running():
            ending = asyncio.create_task(self._drain(name, drain_s))
        await asyncio.wait([ending])  # until it has drained, or is killed meanwhile
        if not process.is_dead and name in self._apps:
            with process.running():
                ending = asyncio.create_task(self._stop_serving(name))
            await asyncio.wait([ending])
        tasks = tuple(process.tasks)
        for task in tasks:
            task.cancel()
        if tasks and not process.is_dead:
            await asyncio.wait(tasks, timeout=FAREWELL_S)
        self.kill(name)

    async def _stop_serving(self, name: str) -> None:
        """End what a frontend still serves, as its servers do, each with what follows from it at the engines."""
        process, in_flight = self.processes[name], self._apps[name].state.in_flight
        stopping = asyncio.create_task(self.network.stop_server(process, STOP_GRACE_S))
        until = asyncio.get_running_loop().time() + STOP_GRACE_S
        await self._wait_none(lambda: self._generators[name].num_active, until)
        in_flight.end_all()
        await stopping
        await self._wait_none(lambda: self._generators[name].num_active, until + FAREWELL_S)

    async def _drain(self, name: str, drain_s: float) -> None:
        until = asyncio.get_running_loop().time() + drain_s
        match name.partition("-")[0]:
            case "worker":
                publisher, lease = self._workers[name]
                publisher.change(phase=Phase.DRAINING, progress=0.0)
                lease.drain()
                await self._wait_none(lambda: lease.num_in_flight, until)
            case "enginecore":
                self._engines[name].operator.stop_taking()
                await self._wait_none(lambda: self._engines[name].num_requests, until)
                self._sessions[name].close()
            case _:
                await self._generators[name].drain(drain_s)
        await asyncio.sleep(0.05)

    async def _wait_none(self, count: Callable[[], int], until: float) -> None:
        while count() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)

    def change(self, name: str, what: str) -> None:
        """Let a process be another when it is started again. `what`: empty: the first one again."""
        self._changes[name] = what

    def stop(self, name: str) -> None:
        """Send SIGSTOP."""
        self.processes[name].is_stopped = True
        self.network.watch_stopped(self.processes[name])

    async def usurp(self, name: str) -> Callable[[], None]:
        """Stop a process and start another one in its place. Return what lets the first go on."""
        first = self.processes[name]
        self.stop(name)
        self.network.forget(first)
        await self._begin(name)
        return first.go_on

    def go_on(self, name: str) -> None:
        """Send SIGCONT."""
        self.processes[name].go_on()

    async def generate(self, request: Request, attempt: int) -> AsyncGenerator[Event, None]:
        """Have the frontends answer a request, by our own client: each attempt begins at another one."""
        first = (hash(request.prompt) + attempt) % self.num_frontends
        if request.http:
            with self._client.running():
                async with aclosing(
                    resume_over_http(
                        self._post,
                        self.num_frontends,
                        first,
                        request,
                        attaches_twice=request.http == "twice",
                    )
                ) as events:
                    async for event in events:
                        yield event
            return
        order = [(first + place) % self.num_frontends for place in range(self.num_frontends)]
        addresses = ",".join(f"frontend-{index}:1" for index in order)
        with self._client.running():
            async with (
                GenerationClient(addresses) as client,
                aclosing(
                    client.generate(list(request.prompt), request.sampling, timeout_s=request.timeout_s)
                ) as events,
            ):
                async for event in events:
                    yield event

    def _post(
        self, number: int, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        name = f"frontend-{number}"
        return post(self.processes[name], self._apps[name], headers, body)

    def cut(self, client: str, server: str, *, is_server_told: bool) -> None:
        self.network.cut(client, server, is_server_told=is_server_told)

    def hold(self, client: str, server: str, *ways: str) -> None:
        self.network.hold(client, server, *ways)

    def heal(self, client: str, server: str) -> None:
        self.network.heal(client, server)

    async def homes(self) -> list[Home]:
        """Return what each process holds."""
        homes = []
        for name, loop in self._engines.items():
            if self.processes[name].is_dead:
                continue
            status = loop.operator.status()
            held = {key: getattr(status, key) for key in ("num_running", "num_waiting", "num_used_blocks")}
            living = sum(not self.processes[other].is_dead for other in self._generators)
            held["sessions of dead frontends"] = len(self._sessions[name].sessions) - living
            homes.append(Home(name, held))
        for name, generator in self._generators.items():
            if not self.processes[name].is_dead:
                in_flight = sum(client.num_in_flight for client in self._clients[name])
                homes.append(Home(name, {"num_active": generator.num_active, "choices in flight": in_flight}))
        return homes

    def _open_channel(self, address: str, **_: Any) -> Channel:
        return Channel(self.network, address)

    def _config(self, index: int) -> EngineConfig:
        config = EngineConfig()
        if self.transfers is not None:
            role = "decode" if index else "prefill"
            config = replace(config, engine=replace(config.engine, role=role))
        return replace(
            config,
            scheduler=replace(config.scheduler, max_num_seqs=16, max_num_batched_tokens=256),
            engine=replace(config.engine, worker_address=f"worker-{index}:1", engine_id=f"engine-{index}"),
        )

    def _start_worker(self, name: str) -> None:
        config, change = self._config(0), self._changes.get(name, "")
        runner = NaiveRunner(
            config,
            num_blocks=80 if self.transfers is not None else 200,
            max_model_len=_MAX_MODEL_LEN - 16 * (change == "limits"),
        )
        if self._groups:
            kv = replace(
                runner.facts.kv,
                num_blocks=400,
                groups=self._groups,
                num_state_blocks=60,
                continues_states=True,
            )
            runner.facts = replace(runner.facts, kv=kv)
        boot_id = f"{name}.{self._lives[name]}"
        identity, key = _MODELS.get(change, (NAIVE_IDENTITY, 0))
        model = replace(runner.facts.model, identity=identity, vocab_size=TEXT_VOCAB_SIZE)
        facts = replace(runner.facts, boot_id=boot_id, model=model)
        publisher = StatusPublisher()

        def note(epoch: int, step_id: int) -> None:
            holder = lease._session.hello.boot_id if lease._session is not None else ""
            self.steps.append(Step(boot_id, holder, epoch, step_id))

        transfers = None
        if self.transfers is not None:
            layout = f"{key:064x}"
            transfers = MemoryTransfers(self.processes[name], layout, lambda: runner.worker, self.transfers)
            facts = replace(facts, kv_endpoint=transfers.endpoint)
            step_s = STEP_S if int(name.partition("-")[2]) else PREFILL_STEP_S
            thread = InlineRunner(runner, note, key, on_result=self.transfers.carry_all, step_s=step_s)
        else:
            thread = InlineRunner(runner, note, key)
        lease = WorkerLease(
            publisher,
            thread,  # type: ignore[arg-type]
            shared_config(config),
            resume_ttl_s=config.engine.resume_ttl_s,
        )
        lease.kv_transfers = transfers  # type: ignore[assignment]
        right = lease.open

        def open_noted(hello: EngineHello) -> Grant:
            grant = right(hello)
            note(grant.session.epoch, 0)
            return grant

        lease.open = open_noted  # type: ignore[method-assign]
        self._workers[name] = (publisher, lease)
        sleep = SleepControl(lease, thread, publisher, set_ready=_do_nothing)  # type: ignore[arg-type]
        adapters = AdapterControl(RankAdapters(config, lambda: None, thread))  # type: ignore[arg-type]
        metrics = WorkerMetrics.create(CollectorRegistry())
        servicer = WorkerServicer(lease, sleep, adapters, publisher, metrics)
        handlers = HandlerCollector()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, handlers)
        self.network.serve(f"{name}:1", handlers.handlers)
        publisher.change(phase=Phase.READY, progress=1.0, facts=facts)
        self._watch(asyncio.create_task(thread.run()), name)

    def _start_engine(self, name: str, index: int) -> None:
        config = self._config(index)
        if self._changes.get(name) == "limits":
            max_num_waiting = config.scheduler.max_num_waiting + 1
            config = replace(config, scheduler=replace(config.scheduler, max_num_waiting=max_num_waiting))
        loop = self._engines[name] = EngineLoop(
            config=config,
            executor=GrpcExecutor(
                address=config.engine.worker_address,
                engine_id=config.engine.engine_id,
                boot_id=f"{name}.{self._lives[name]}",
                shared_config=shared_config(config),
                max_steps_in_flight=config.scheduler.steps_in_flight or MAX_STEPS_IN_FLIGHT,
            ),
            metrics=EngineMetrics.create(CollectorRegistry()),
            on_ready_change=lambda ready: None,
        )
        servicer = EngineCoreServicer(loop, resume_ttl_s=config.engine.resume_ttl_s)
        self._sessions[name] = servicer
        handlers = HandlerCollector()
        engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, handlers)
        self.network.serve(f"{name}:1", handlers.handlers)
        self._watch(asyncio.create_task(loop.run()), name)

    def _start_frontend(self, name: str) -> None:
        router = Router({})
        router.engines = self._clients[name] = [
            EngineClient(
                f"enginecore-{index}:1",
                frontend_id=name,
                boot_id=f"{name}.{self._lives[name]}",
                on_change=router.on_change,
            )
            for index in range(self.num_engines)
        ]
        metrics = FrontendMetrics.create(CollectorRegistry())
        migrator = Migrator(router, metrics, MigrationTerms())
        config = FrontendConfig()
        generator = self._generators[name] = Generator(router, metrics, migrator, keep_s=config.keep_s)
        generator.set_text_model(TextModel(byte_tokenizer(), {}, Path("no-checkpoint")))
        self._apps[name] = create_app(generator)
        handlers = HandlerCollector()
        servicer = GenerationServicer(generator, config.client_timeout_s, LongReader())
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, handlers)
        self.network.serve(f"{name}:1", handlers.handlers)
        for work in (migrator.run(), *(client.run() for client in router.engines)):
            self._watch(asyncio.create_task(work), name)

    def _watch(self, task: asyncio.Task[Any], name: str) -> None:
        """Note a task that should go on for ever and does not."""

        def note(done: asyncio.Task[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, StaleEpoch):  # by which a fenced engine ends
                self.bugs.append(f"{name} ended: {error!r}")

        task.add_done_callback(note)


async def _do_nothing(is_ready: bool) -> None:
    return


def play_in_memory(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, *, on_begin: Callable[[], None] = lambda: None
) -> list[str]:
    """Play a scenario in fake time and return what is wrong with what was seen; bugs that showed themselves as well."""
    bugs: list[str] = []
    random.seed(scenario.seed)

    async def work() -> Evidence:
        ground = MemoryGround(
            monkeypatch,
            num_engines=scenario.num_engines,
            num_frontends=scenario.num_frontends,
            has_transfers=scenario.has_transfers,
            has_groups=scenario.has_groups,
        )
        try:
            return await play(ground, scenario, on_begin=on_begin)
        except Exception as error:
            error.add_note("; ".join((*ground.bugs, *ground.network.bugs)))
            raise
        finally:
            bugs.extend((*ground.bugs, *ground.network.bugs))

    return violations_of(run_in_fake_time(monkeypatch, work)) + bugs
