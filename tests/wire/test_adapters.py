"""LoRA adapters between operator, engine and worker: real servicers over loopback gRPC, adapters without tensors."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

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
from triptych.errors import EngineUnavailable, InvalidRequest
from triptych.rpc.status import from_rpc_error
from triptych.types.adapters import AdapterFacts
from triptych.types.outputs import FinishedRequest, RequestFailure
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.simulation.adapters import SimulatedAdapters


class AdapterRunner(NaiveRunner):
    """Notes the adapters of the rows that enter."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.facts = replace(self.facts, max_adapters=2, max_adapter_rank=64)
        self.adapters = SimulatedAdapters(max_bytes=1000)
        self.entered: list[str] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered += [row.content.adapter for row in plan.new_rows]
        return super().execute(plan)


class Stack:
    """An engine, a frontend, and the worker of now."""

    def __init__(self, root: Path, at_start: str) -> None:
        self.root = root
        self.at_start = at_start

    async def start(self) -> None:
        await self.start_worker(0)
        self.engine = EngineStack(self.config(self.worker.port))
        await self.engine.start()
        self.frontend = FakeFrontend(self.engine.address)
        await self.frontend.start()

    def config(self, port: int = 0) -> EngineConfig:
        config = make_config(port)
        model = replace(config.model, adapter_root=str(self.root), adapters=self.at_start)
        return replace(config, model=model)

    async def start_worker(self, port: int) -> None:
        config = self.config()
        self.runner = AdapterRunner(config)
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

    async def run(self, number: int, adapter: str, digest: str) -> FinishedRequest | RequestFailure:
        await self.frontend.submit(number, [1, 2, 3], adapter=adapter, adapter_digest=digest)
        await self.frontend.wait_for(lambda: number in self.frontend.ends)
        return self.frontend.ends[number]


def make_adapter(root: Path, name: str) -> str:
    """Make a directory of an adapter, and return its digest."""
    (root / name).mkdir()
    (root / name / "adapter_config.json").write_text(name)
    return hashlib.sha256(name.encode()).hexdigest()


@asynccontextmanager
async def running(root: Path, at_start: str = "") -> AsyncIterator[Stack]:
    stack = Stack(root, at_start)
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


async def test_adapter_is_loaded_listed_used_and_unloaded(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        loaded = await stack.load("sql")
        assert (loaded.digest, loaded.source, list(loaded.engine_ids)) == (digest, "sql", ["engine-0"])
        assert await stack.list() == ["sql"]
        await stack.frontend.wait_for(lambda: bool(stack.frontend.welcomes[-1].adapters))
        assert stack.frontend.welcomes[-1].adapters == (AdapterFacts("sql", digest, 1, "sql"),)
        assert isinstance(await stack.run(1, "sql", digest), FinishedRequest)
        assert isinstance(await stack.run(2, "", ""), FinishedRequest)
        assert stack.runner.entered == [digest, ""]
        await stack.unload("sql")
        assert await stack.list() == []
        await stack.frontend.wait_for(lambda: not stack.frontend.welcomes[-1].adapters)
        end = await stack.run(3, "sql", digest)
        assert isinstance(end, RequestFailure)
        assert end.code == EngineUnavailable.code
        await until(lambda: not stack.runner.adapters.list())
        with pytest.raises(InvalidRequest, match="'sql' is not loaded"):
            await stack.unload("sql")


async def test_request_for_other_tensors_of_the_same_name_is_refused(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        end = await stack.run(1, "sql", "0" * 64)
        assert isinstance(end, RequestFailure)
        assert digest in end.message
        assert not stack.runner.entered


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("../sql", "sql", "is a path"),
        ("a/b", "sql", "is a path"),
        ("", "sql", "has 0 characters"),
        ("x" * 129, "sql", "has 129 characters, the limits are 1..128"),
        ("a b", "sql", "other characters"),
        ("naive", "sql", "is the name of the model"),
        ("sql", "..", "is not within model.adapter_root"),
        ("sql", "/etc", "is not within model.adapter_root"),
        ("sql", "link", "is not within model.adapter_root"),
        ("sql", "circle", "circle"),
        ("sql", "missing", "is no directory"),
        ("sql", "", "is no path"),
        ("sql", "a\0b", "is no path"),
        ("sql", "empty", "adapter_config.json"),
        ("sql", "large", r"'large' has 1001 bytes, the others have 4, and 1000 is the limit"),
    ],
)
async def test_bad_adapter_is_refused_alone(tmp_path: Path, name: str, source: str, words: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make_adapter(tmp_path, "outside")
    digest = make_adapter(root, "good")
    (root / "empty").mkdir()
    (root / "large").mkdir()
    (root / "large" / "adapter_config.json").write_bytes(bytes(1001))
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to(root / "circle")
    async with running(root) as stack:
        await stack.load("good")
        with pytest.raises(Exception, match=words):
            await stack.load(name, source)
        assert await stack.list() == ["good"]
        assert isinstance(await stack.run(1, "good", digest), FinishedRequest)


async def test_without_a_root_only_the_adapters_of_the_config_are_loaded(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    stack = Stack(Path(), f"sql={tmp_path / 'sql'}")
    stack.root = ""  # type: ignore[assignment]
    await stack.start()
    try:
        await stack.frontend.wait_ready()
        assert await stack.list() == ["sql"]
        assert isinstance(await stack.run(1, "sql", digest), FinishedRequest)
        with pytest.raises(Exception, match=r"model\.adapter_root is empty"):
            await stack.load("more", str(tmp_path / "sql"))
    finally:
        await stack.stop()


async def test_running_request_goes_on_when_its_adapter_is_unloaded(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        stack.runner.may_step.clear()
        await stack.frontend.submit(1, [1, 2, 3], adapter="sql", adapter_digest=digest)
        await until(lambda: stack.runner.entered)
        await stack.unload("sql")
        assert await stack.list() == []
        await asyncio.sleep(0.3)
        assert [facts.digest for facts in stack.runner.adapters.list()] == [digest], "freed while it is used"
        stack.runner.may_step.set()
        await stack.frontend.wait_for(lambda: 1 in stack.frontend.ends)
        assert isinstance(stack.frontend.ends[1], FinishedRequest)
        await until(lambda: not stack.runner.adapters.list())


async def test_next_worker_is_given_the_adapters_before_rows_that_use_them(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        stack.runner.may_step.clear()
        await stack.frontend.submit(1, [1, 2, 3], adapter="sql", adapter_digest=digest)
        await until(lambda: stack.runner.entered)
        port = stack.worker.port
        await stack.worker.stop()
        await stack.start_worker(port)
        await stack.frontend.wait_for(lambda: 1 in stack.frontend.ends)
        assert isinstance(stack.frontend.ends[1], FinishedRequest)
        assert stack.runner.entered == [digest]
        assert stack.runner.adapters.list() == (AdapterFacts("sql", digest, 1, "sql"),)


async def test_worker_that_dies_while_it_loads_refuses_the_load_only(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    make_adapter(tmp_path, "more")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        is_loading, may_load = threading.Event(), threading.Event()
        load = stack.runner.adapters.load

        def load_slowly(*arguments: Any) -> AdapterFacts:
            is_loading.set()
            may_load.wait(DEADLINE_S)
            return load(*arguments)

        stack.runner.adapters.load = load_slowly  # type: ignore[method-assign]
        loading = asyncio.create_task(stack.load("more"))
        await until(is_loading.is_set)
        assert isinstance(await stack.run(1, "sql", digest), FinishedRequest), "steps wait for the load"
        port = stack.worker.port
        await stack.worker.stop()
        await stack.start_worker(port)
        with pytest.raises(EngineUnavailable):
            await loading
        may_load.set()
        assert isinstance(await stack.run(2, "sql", digest), FinishedRequest)
        assert await stack.list() == ["sql"]
        await stack.load("more")
        assert await stack.list() == ["more", "sql"]


async def test_next_engine_takes_over_what_its_worker_has(tmp_path: Path) -> None:
    make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        await stack.frontend.stop()
        await stack.engine.stop()
        stack.engine = EngineStack(stack.config(stack.worker.port))
        await stack.engine.start()
        stack.frontend = FakeFrontend(stack.engine.address)
        await stack.frontend.start()
        await stack.frontend.wait_ready()
        assert await stack.list() == ["sql"]
