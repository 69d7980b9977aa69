"""An engine with a worker that serves LoRA adapters without tensors, and its operator: over loopback gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio

from tests.helpers.stack import (
    DEADLINE_S,
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
)
from triptych.admin.v1 import admin_pb2
from triptych.config import EngineConfig
from triptych.rpc.status import from_rpc_error
from triptych.types.adapters import AdapterFacts
from triptych.types.outputs import FinishedRequest, RequestFailure
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.simulation.runner import SimulatedAdapters


class AdapterRunner(NaiveRunner):
    """Notes the adapters of the rows that enter."""

    def __init__(self, config: EngineConfig, max_bytes: int = 1000) -> None:
        super().__init__(config)
        self.facts = replace(self.facts, max_adapters=2, max_adapter_rank=64)
        self.adapters = SimulatedAdapters(2, max_bytes)
        self.entered: list[str] = []

    def execute(self, plan: StepPlan) -> StepResult:
        loaded = {"", *(facts.digest for facts in self.adapters.list())}
        for row in plan.new_rows:
            assert row.content.adapter in loaded, "a row came before its adapter"
            self.entered.append(row.content.adapter)
        return super().execute(plan)


class AdapterStack:
    """An engine, a frontend, and the worker of now."""

    def __init__(
        self, root: Path | str, at_start: str = "", engine_id: str = "engine-0", max_bytes: int = 1000
    ) -> None:
        """
        Args:
            max_bytes: Bytes of the files of all adapters that the worker has in memory.
        """
        self.root = root
        self.max_bytes = max_bytes
        self.at_start = at_start
        self.engine_id = engine_id
        self.loads: list[str] = []
        """Names of the adapters that the worker was asked to read during `slow_loads`."""

    async def start(self) -> None:
        await self.start_worker(0)
        self.engine = EngineStack(self.config(self.worker.port))
        await self.engine.start()
        self.frontend = FakeFrontend(self.engine.address)
        await self.frontend.start()

    def config(self, port: int = 0) -> EngineConfig:
        config = make_config(port)
        model = replace(config.model, adapter_root=str(self.root), adapters=self.at_start)
        return replace(config, model=model, engine=replace(config.engine, engine_id=self.engine_id))

    async def start_worker(self, port: int) -> None:
        config = self.config()
        self.runner = AdapterRunner(config, self.max_bytes)
        self.runner.facts = replace(self.runner.facts, boot_id=f"boot-{id(self.runner)}")
        self.worker = WorkerStack(config, self.runner)
        await self.worker.start(port)

    async def stop(self) -> None:
        await self.frontend.stop()
        await self.engine.stop()
        await self.worker.stop()

    async def load(self, name: str, source: str | None = None) -> Any:
        request = admin_pb2.LoadAdapterRequest(name=name, source=name if source is None else source)
        try:
            return (await self.frontend.admin.LoadAdapter(request, timeout=DEADLINE_S)).adapter
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def unload(self, name: str) -> None:
        try:
            await self.frontend.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def list(self) -> list[str]:
        listed = await self.frontend.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        return [adapter.name for adapter in listed.adapters]

    async def resident(self) -> list[str]:
        """Return the names of the adapters that the worker has in memory."""
        listed = await self.frontend.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        return [adapter.name for adapter in listed.adapters if adapter.resident_engine_ids]

    async def restart_engine(self) -> None:
        """Let another engine take the place of the first one."""
        await self.frontend.stop()
        await self.engine.stop()
        self.engine = EngineStack(self.config(self.worker.port))
        await self.engine.start()
        self.frontend = FakeFrontend(self.engine.address)
        await self.frontend.start()
        await self.frontend.wait_ready()

    async def run(
        self, number: int, adapter: str, digest: str, **fields: Any
    ) -> FinishedRequest | RequestFailure:
        await self.frontend.submit(number, [1, 2, 3], adapter=adapter, adapter_digest=digest, **fields)
        await self.frontend.wait_for(lambda: number in self.frontend.ends)
        return self.frontend.ends[number]


def make_adapter(root: Path, name: str) -> str:
    """Make a directory of an adapter, and return its digest."""
    (root / name).mkdir()
    (root / name / "adapter_config.json").write_text(name)
    return hashlib.sha256(name.encode()).hexdigest()


@contextmanager
def slow_loads(stack: AdapterStack) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let loads wait; the events say that one has begun, and that it may go on."""
    is_loading, may_load = threading.Event(), threading.Event()
    adapters = stack.runner.adapters
    load = adapters.load

    def load_slowly(*arguments: Any) -> AdapterFacts:
        stack.loads.append(arguments[0])
        is_loading.set()
        may_load.wait(DEADLINE_S)
        return load(*arguments)

    adapters.load = load_slowly  # type: ignore[method-assign]
    try:
        yield is_loading, may_load
    finally:
        may_load.set()
        adapters.load = load  # type: ignore[method-assign]


@asynccontextmanager
async def running(root: Path, *options: Any, **more: Any) -> AsyncIterator[AdapterStack]:
    stack = AdapterStack(root, *options, **more)
    await stack.start()
    try:
        await stack.frontend.wait_ready()
        yield stack
    finally:
        await stack.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
