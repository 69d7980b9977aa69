"""LoRA adapters between operator, engine and worker: real servicers over loopback gRPC, adapters without tensors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.adapter_stack import AdapterStack, make_adapter, running, slow_loads, until
from tests.helpers.stack import EngineStack, FakeFrontend
from triptych.errors import EngineUnavailable, InvalidRequest
from triptych.types.adapters import AdapterFacts
from triptych.types.outputs import FinishedRequest, RequestFailure


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
    stack = AdapterStack("", f"sql={tmp_path / 'sql'}")
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


async def test_next_worker_is_given_an_adapter_without_a_name_that_a_request_has(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        stack.runner.may_step.clear()
        await stack.frontend.submit(1, [1, 2, 3], adapter="sql", adapter_digest=digest)
        await until(lambda: stack.runner.entered)
        await stack.unload("sql")
        port = stack.worker.port
        await stack.worker.stop()
        await stack.start_worker(port)
        await stack.frontend.wait_for(lambda: 1 in stack.frontend.ends)
        assert isinstance(stack.frontend.ends[1], FinishedRequest)
        assert stack.runner.entered == [digest]
        assert await stack.list() == []
        await until(lambda: not stack.runner.adapters.list())


async def test_worker_that_dies_while_it_loads_refuses_the_load_only(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    make_adapter(tmp_path, "more")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        with slow_loads(stack) as (is_loading, may_load):
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


async def test_engine_that_is_killed_while_its_worker_loads_leaves_no_harm(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    more = make_adapter(tmp_path, "more")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        with slow_loads(stack) as (is_loading, may_load):
            loading = asyncio.create_task(stack.load("more"))
            await until(is_loading.is_set)
            await stack.engine.kill()
            with pytest.raises(Exception, match=r"(?i)unavailable|cancel|closed|reset|refused"):
                await loading
            await stack.frontend.stop()
            stack.engine = EngineStack(stack.config(stack.worker.port))
            await stack.engine.start()
            stack.frontend = FakeFrontend(stack.engine.address)
            await stack.frontend.start()
            await stack.frontend.wait_ready()
            assert await stack.list() == ["sql"], "what was not loaded has no name"
            assert isinstance(await stack.run(1, "sql", digest), FinishedRequest), "the worker loads still"
            may_load.set()
            await stack.load("more")
            assert isinstance(await stack.run(2, "more", more), FinishedRequest)
            assert await stack.list() == ["more", "sql"]


async def test_next_engine_takes_over_what_its_worker_has(tmp_path: Path) -> None:
    make_adapter(tmp_path, "sql")
    async with running(tmp_path) as stack:
        await stack.load("sql")
        await stack.restart_engine()
        assert await stack.list() == ["sql"]
