"""Adapters in a memory that does not hold all of them: over loopback gRPC, with a worker that takes no row without."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.adapter_stack import AdapterStack, make_adapter, running, slow_loads, until
from triptych.errors import EngineFailure, MemoryShort, ModelError
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import EngineStatus
from triptych.types.outputs import FinishedRequest, RequestFailure
from triptych_services.enginecore.adapters import EngineAdapters
from triptych_services.enginecore.resident_adapters import ReadTurns
from triptych_services.worker.simulation.runner import CONFIG_FILE

NAMES = ("aaa", "bbb", "ccc")
ROOM_FOR_TWO = 7
"""Bytes, of which each of these takes three."""


@pytest.fixture
def digests(tmp_path: Path) -> dict[str, str]:
    return {name: make_adapter(tmp_path, name) for name in NAMES}


async def load_all(stack: AdapterStack) -> None:
    for name in NAMES:
        await stack.load(name)


def counts_of(stack: AdapterStack) -> EngineStatus:
    return stack.engine.loop.operator.status()


async def test_what_was_used_last_stays_and_all_keep_their_names(tmp_path: Path, digests) -> None:
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        assert (await stack.list(), await stack.resident()) == ([*NAMES], ["bbb", "ccc"])
        for number, (name, resident) in enumerate(
            [
                ("bbb", ["bbb", "ccc"]),
                ("aaa", ["aaa", "bbb"]),
                ("ccc", ["aaa", "ccc"]),
                ("aaa", ["aaa", "ccc"]),
            ]
        ):
            assert isinstance(await stack.run(number, name, digests[name]), FinishedRequest)
            assert await stack.resident() == resident
        counts = counts_of(stack)
        assert (counts.num_adapters, counts.num_resident_adapters, counts.resident_adapter_bytes) == (3, 2, 6)
        assert (counts.num_adapter_reads, counts.num_adapter_drops) == (2, 3)


async def test_no_other_request_waits_while_an_adapter_is_read_again(tmp_path: Path, digests) -> None:
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        with slow_loads(stack) as (is_loading, may_load):
            waiting = asyncio.create_task(stack.run(1, "aaa", digests["aaa"]))
            await until(is_loading.is_set)
            assert isinstance(await stack.run(2, "ccc", digests["ccc"]), FinishedRequest)
            assert isinstance(await stack.run(3, "", ""), FinishedRequest)
            assert not waiting.done()
            may_load.set()
            assert isinstance(await waiting, FinishedRequest)
        assert stack.runner.entered == [digests["ccc"], "", digests["aaa"]]


@pytest.mark.parametrize("harm", ["changed", "gone"])
async def test_an_adapter_with_other_files_fails_its_requests_alone(tmp_path: Path, digests, harm) -> None:
    words = {"changed": "have changed since it was loaded", "gone": "is no directory"}[harm]
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        if harm == "changed":
            (tmp_path / "aaa" / CONFIG_FILE).write_text("new")
        else:
            shutil.rmtree(tmp_path / "aaa")
        for number in (1, 2):  # also those that come later
            end = await stack.run(number, "aaa", digests["aaa"])
            assert isinstance(end, RequestFailure)
            assert end.code == EngineFailure.code
            assert "'aaa'" in end.message
            assert words in end.message
        assert isinstance(await stack.run(3, "bbb", digests["bbb"]), FinishedRequest)
        assert await stack.list() == [*NAMES]
        shutil.rmtree(tmp_path / "aaa", ignore_errors=True)
        digest = make_adapter(tmp_path, "aaa")
        assert (await stack.load("aaa")).digest == digest
        assert isinstance(await stack.run(4, "aaa", digest), FinishedRequest)


async def test_a_defect_fails_the_requests_of_one_adapter_and_no_other_waits_for_ever(
    tmp_path: Path, digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = EngineAdapters._find

    def find_or_break(self: EngineAdapters, digest: str) -> AdapterFacts | None:
        if digest == digests["aaa"]:
            raise RuntimeError("a defect")
        return find(self, digest)

    monkeypatch.setattr(EngineAdapters, "_find", find_or_break)
    async with running(tmp_path, max_bytes=4) as stack:
        await load_all(stack)
        ends = await asyncio.gather(stack.run(1, "aaa", digests["aaa"]), stack.run(2, "bbb", digests["bbb"]))
        assert [type(end) for end in ends] == [RequestFailure, FinishedRequest]
        assert ends[0].code == EngineFailure.code


async def test_an_adapter_with_rows_stays_until_they_end(tmp_path: Path, digests) -> None:
    async with running(tmp_path, max_bytes=4) as stack:
        await load_all(stack)
        assert await stack.resident() == ["ccc"]
        stack.runner.may_step.clear()
        await stack.frontend.submit(1, [1, 2, 3], adapter="ccc", adapter_digest=digests["ccc"])
        await until(lambda: stack.runner.entered)
        make_adapter(tmp_path, "ddd")
        with pytest.raises(MemoryShort, match="3 bytes"):
            await stack.load("ddd")
        waiting = asyncio.create_task(stack.run(2, "aaa", digests["aaa"]))
        await asyncio.sleep(0.2)
        assert await stack.resident() == ["ccc"]
        stack.runner.may_step.set()
        assert isinstance(await waiting, FinishedRequest)
        assert isinstance(stack.frontend.ends[1], FinishedRequest)
        assert await stack.resident() == ["aaa"]


@pytest.mark.thorough
async def test_adapters_take_turns_in_a_memory_for_one(tmp_path: Path, digests) -> None:
    """Each has requests all the time, and more than one memory holds."""
    async with running(tmp_path, max_bytes=4) as stack:
        await load_all(stack)
        numbers, done, may_write = itertools.count(), dict.fromkeys(NAMES, 0), asyncio.Lock()

        async def ask(name: str) -> None:
            while min(done.values()) < 4:
                number = next(numbers)
                async with may_write:
                    await stack.frontend.submit(number, [1, 2, 3], adapter=name, adapter_digest=digests[name])
                await until(partial(stack.frontend.ends.__contains__, number))
                assert isinstance(stack.frontend.ends[number], FinishedRequest)
                done[name] += 1

        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(name) for name in NAMES for _ in range(3)))
        changes = sum(
            one != other for one, other in zip(stack.runner.entered, stack.runner.entered[1:], strict=False)
        )
        assert changes < len(stack.runner.entered) / 2, "an exchange for each request"


@pytest.mark.thorough
async def test_the_next_worker_has_what_requests_wait_for(tmp_path: Path, digests) -> None:
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        with slow_loads(stack) as (is_loading, may_load):
            waiting = asyncio.create_task(stack.run(1, "aaa", digests["aaa"]))
            await until(is_loading.is_set)
            port = stack.worker.port
            stopping = asyncio.create_task(stack.worker.stop())
            await asyncio.sleep(0.05)
            may_load.set()
            await stopping
        await stack.start_worker(port)
        assert isinstance(await waiting, FinishedRequest)
        assert "aaa" in await stack.resident()
        assert await stack.list() == [*NAMES]
        for number, name in enumerate(NAMES, 2):
            assert isinstance(await stack.run(number, name, digests[name]), FinishedRequest)


async def test_the_next_engine_knows_the_names_of_what_is_in_no_memory(tmp_path: Path, digests) -> None:
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        await stack.restart_engine()
        assert (await stack.list(), await stack.resident()) == ([*NAMES], ["bbb", "ccc"])
        assert isinstance(await stack.run(1, "aaa", digests["aaa"]), FinishedRequest)
        await stack.unload("aaa")
        await stack.unload("bbb")
        await until(lambda: stack.engine.loop.adapters._releasing.done())  # type: ignore[union-attr]
        await stack.restart_engine()
        assert await stack.list() == ["ccc"]


async def test_what_no_memory_holds_drives_out_no_other(tmp_path: Path, digests) -> None:
    make_adapter(tmp_path, "12345678")
    async with running(tmp_path, max_bytes=ROOM_FOR_TWO) as stack:
        await load_all(stack)
        with pytest.raises(ModelError, match="7 is the limit"):
            await stack.load("12345678")
        assert await stack.resident() == ["bbb", "ccc"]


async def test_a_tenant_that_names_many_adapters_keeps_others_waiting_for_one_read(tmp_path: Path) -> None:
    names = ["own", *(f"{number:03}" for number in range(20))]
    digests = {name: make_adapter(tmp_path, name) for name in (*names, "new")}
    async with running(tmp_path, max_bytes=30) as stack:  # for ten
        for name in names:
            await stack.load(name)
        with slow_loads(stack) as (is_loading, may_load):
            stack.loads.clear()
            awaited = stack.engine.loop.adapters._memory._awaited
            for number, name in enumerate(names[1:11], 1):
                await stack.frontend.submit(
                    number, [1, 2, 3], adapter=name, adapter_digest=digests[name], tenant="greedy"
                )
            await until(lambda: is_loading.is_set() and len(awaited) == 10)
            own = asyncio.create_task(stack.run(11, "own", digests["own"], tenant="bystander"))
            await until(lambda: len(awaited) == 11)
            loading = asyncio.create_task(stack.load("new"))
            await until(lambda: stack.engine.loop.adapters._num_loads == 1)
            may_load.set()
            ends = await asyncio.gather(own, loading)
            assert isinstance(ends[0], FinishedRequest)
            await until(lambda: len(stack.frontend.ends) == 11)
        order = [name for name, _ in itertools.groupby(stack.loads)]  # each twice, since another makes way
        assert (order[0], sorted(order[1:3]), order[3:]) == ("000", ["new", "own"], names[2:11])


def test_turns_of_reads() -> None:
    turns = ReadTurns()
    tenants = {"a": {"x"}, "b": {"x"}, "c": {"x"}, "d": {"y"}, "e": {"x", "z"}}
    since_s = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 4.0, "gone": 5.0}
    order = []
    while since_s:
        order.append(turns.choose(since_s, tenants))
        del since_s[order[-1]]
    assert order == ["a", "d", "e", "gone", "b", "c"]
    assert turns.choose({"f": 6.0, "g": 7.0}, {"f": {"x"}, "g": {"w"}}) == "g", "x has had its turn just now"


async def test_adapters_at_the_start_need_no_memory_for_all(tmp_path: Path, digests) -> None:
    at_start = ",".join(f"{name}={tmp_path / name}" for name in NAMES)
    async with running(tmp_path, at_start, max_bytes=4) as stack:
        assert await stack.list() == [*NAMES]
        for number, name in enumerate(NAMES):
            assert isinstance(await stack.run(number, name, digests[name]), FinishedRequest)
