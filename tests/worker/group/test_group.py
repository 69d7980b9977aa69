"""A leader and its followers over real sockets: who is let in, what is relayed to whom, and whose end is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.adapter_stack import AdapterRunner, make_adapter
from tests.helpers.stack import make_config
from tests.worker.tiny import new_row, step_plan
from triptych.config import EngineConfig, ModelConfig, ParallelConfig, WorkerConfig
from triptych.errors import ConfigError, HandshakeMismatch, MemoryShort, ModelError, RankUnavailable
from triptych.types.facts import SleepLevel
from triptych.types.step import StepPlan
from triptych.wire.step import Step, StepEncoder
from triptych_services.worker.group import follower as follower_module
from triptych_services.worker.group import leader as leader_module
from triptych_services.worker.group.follower import GroupFollower
from triptych_services.worker.group.leader import GroupLeader
from triptych_services.worker.group.leader_thread import LeaderAdapters
from triptych_services.worker.group.messages import LeaderMessage
from triptych_services.worker.service.adapters import RankAdapters

DEADLINE_S = 20.0


class RecordedThread:
    """Stands in for a `RunnerThread`: writes down what it is given."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.others: list[object] = []

    def open_session(self, deliver: Callable[[Any], None]) -> int:
        self.others.append("session")
        return 1

    def submit(self, session: int, plan: StepPlan, message: Step) -> None:
        self.plans.append(plan)

    async def sleep(self, level: SleepLevel) -> int:
        self.others.append(level)
        return 10

    async def wake(self) -> None:
        self.others.append("wake")

    async def between_steps(self, act: Callable[[], object]) -> None:
        self.others.append(f"after {len(self.plans)} steps")
        act()


class Group:
    """One leader, and followers that run in this process."""

    def __init__(self, num_ranks: int, *, timeout_s: float = DEADLINE_S) -> None:
        self.parallel = ParallelConfig(
            tensor_parallel_size=num_ranks,
            rendezvous_address="127.0.0.1:0",
            timeout_s=timeout_s,
            silence_timeout_s=1.0,
        )
        self.lost: list[str] = []
        self.num_leaving = 0
        self.leader = GroupLeader(
            self.parallel, generation="g", on_leaving=self._note_leaving, on_lost=self.lost.append
        )
        self.followers: dict[int, GroupFollower] = {}
        self.threads: dict[int, RecordedThread] = {}
        self.adapters: dict[int, RankAdapters] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        port = await self.leader.open()
        self.parallel = replace(self.parallel, rendezvous_address=f"127.0.0.1:{port}")
        self.tasks.append(asyncio.create_task(self.leader.gather()))

    def follow(self, rank: int, adapter_root: Path | str = "", **changes: Any) -> GroupFollower:
        """Start a follower."""
        model = ModelConfig(adapter_root=str(adapter_root))
        parallel, worker = replace(self.parallel, **changes), WorkerConfig(rank=rank)
        config = EngineConfig(model=model, parallel=parallel, worker=worker)
        follower = GroupFollower(config, on_result=lambda result: None, on_lost=self.lost.append)
        self.followers[rank], self.threads[rank] = follower, RecordedThread()
        thread, runner = self.threads[rank], AdapterRunner(make_config())
        self.adapters[rank] = RankAdapters(config, lambda: runner, thread)  # type: ignore[arg-type]
        self.tasks.append(asyncio.create_task(self._run(follower, thread, self.adapters[rank])))
        return follower

    async def _run(self, follower: GroupFollower, thread: RecordedThread, adapters: RankAdapters) -> None:
        """Follow until the leader ends the group, and close the connection then, as the end of a process does."""
        try:
            await follower.follow(thread, adapters)  # type: ignore[arg-type]
        finally:
            if follower._writer is not None:
                follower._writer.close()

    def _note_leaving(self) -> None:
        self.num_leaving += 1


@asynccontextmanager
async def group_of(num_ranks: int, **options: Any) -> AsyncIterator[Group]:
    group = Group(num_ranks, **options)
    await group.open()
    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            yield group
    finally:
        for task in group.tasks:
            task.cancel()
        await asyncio.gather(*group.tasks, return_exceptions=True)
        for each in group.leader._followers.values():
            each.writer.close()  # a rank that never met the others has its connection open until its process ends
        await group.leader.leave()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("hosts", [("a", "a", "a", "a"), ("a", "b", "b", "b"), ("a", "b", "a", "b")], ids=str)
async def test_every_rank_is_relayed_the_same_in_the_same_order(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(hosts[1:])
    monkeypatch.setattr(leader_module, "host_name", lambda: hosts[0])
    monkeypatch.setattr(follower_module, "host_name", lambda: next(names))
    async with group_of(len(hosts)) as group:
        for rank in range(1, len(hosts)):
            follower = group.follow(rank)
            await until(lambda rank=rank: rank in group.leader._followers)
        for follower in group.followers.values():
            place = await asyncio.wrap_future(follower.place)
            assert (place.generation, place.hosts) == ("g", hosts)
            assert place.ranks_on_host == hosts.count(hosts[place.rank])
        encoder = StepEncoder()
        plans = [step_plan(1, new=[new_row(0, [5, 6, 7], [1])], chunks={0: 3})]
        plans += [step_plan(step_id) for step_id in range(2, 40)]
        group.leader.relay(LeaderMessage(session_begins={}))
        for plan in plans:
            group.leader.relay(LeaderMessage(step=encoder.encode(plan)))
        call = group.leader.begin_call(sleep=1)
        assert await group.leader.finish_call(call) == 10 * (len(hosts) - 1)
        for thread in group.threads.values():
            assert [plan.step_id for plan in thread.plans] == [plan.step_id for plan in plans]
            assert thread.plans[0].new_rows[0].content.prompt_token_ids.tolist() == [5, 6, 7]
            assert thread.others == ["session", SleepLevel.WEIGHTS_ON_HOST]
        await group.leader.leave()
        assert all(follower.has_left.is_set() for follower in group.followers.values())
        assert group.lost == []


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """One directory for each of three ranks, with an adapter `sql` that is the same and `law` that is not."""
    roots = [tmp_path / str(rank) for rank in range(3)]
    for root in roots:
        root.mkdir()
        make_adapter(root, "sql")
        (root / "law").mkdir()
        (root / "law" / "adapter_config.json").write_text("law" if root is not roots[2] else "another")
        if root is not roots[1]:
            make_adapter(root, "poems")
    return roots


@asynccontextmanager
async def group_with_adapters(roots: list[Path]) -> AsyncIterator[tuple[Group, LeaderAdapters]]:
    async with group_of(len(roots)) as group:
        for rank in range(1, len(roots)):
            group.follow(rank, adapter_root=roots[rank])
        await asyncio.wrap_future(group.leader.place)
        config, runner = (
            EngineConfig(model=ModelConfig(adapter_root=str(roots[0]))),
            AdapterRunner(make_config()),
        )
        thread = group.threads[0] = RecordedThread()
        yield group, LeaderAdapters(group.leader, config, lambda: runner, thread)  # type: ignore[arg-type]


async def test_an_adapter_is_loaded_when_all_ranks_have_it(roots: list[Path]) -> None:
    async with group_with_adapters(roots) as (group, leader):
        facts = await leader.load("sql", "sql")
        every = [leader, *group.adapters.values()]
        assert [each.list() for each in every] == [(facts,)] * 3
        with pytest.raises(ModelError, match=r"rank 1 of its group: .*'poems' is no directory"):
            await leader.load("poems", "poems")
        with pytest.raises(ModelError, match=r"rank 2 of its group: the files there have the digest \w+"):
            await leader.load("law", "law")
        (roots[0] / "law" / "adapter_config.json").unlink()
        with pytest.raises(ModelError, match=r"adapter_config\.json"):  # the leader's own
            await leader.load("law", "law")
        for each in every:
            assert each.list() == (facts,)
            assert each.holder().list() == (facts,), "none keeps what another one lacks"
        (roots[1] / "sql" / "adapter_config.json").unlink()
        with pytest.raises(ModelError, match="rank 1 of its group"):
            await leader.load("sql", "sql")
        assert [each.list() for each in every] == [(facts,)] * 3, "what was loaded stays"


async def test_one_rank_without_memory_asks_for_another_adapter_to_make_way(roots: list[Path]) -> None:
    async with group_with_adapters(roots) as (group, leader):
        facts = await leader.load("sql", "sql")
        for root in roots:
            make_adapter(root, "more")
        group.adapters[2].holder()._max_bytes = 5  # type: ignore[attr-defined]
        with pytest.raises(MemoryShort, match=r"rank 2 of its group: .* 5 is the limit"):
            await leader.load("more", "more")
        await leader.unload(facts.digest)
        more = await leader.load("more", "more")
        assert [each.list() for each in (leader, *group.adapters.values())] == [(more,)] * 3


async def test_an_adapter_is_freed_between_the_same_steps_on_all_ranks(roots: list[Path]) -> None:
    async with group_with_adapters(roots) as (group, leader):
        facts = await leader.load("sql", "sql")
        encoder, steps = StepEncoder(), 5
        group.leader.relay(LeaderMessage(session_begins={}))
        for step_id in range(1, steps + 1):
            plan = step_plan(step_id)
            group.threads[0].plans.append(plan)
            group.leader.relay(LeaderMessage(step=encoder.encode(plan)))
        unloading = asyncio.create_task(leader.unload(facts.digest))
        await asyncio.sleep(0)
        group.leader.relay(LeaderMessage(step=encoder.encode(step_plan(steps + 1))))
        await unloading
        for rank, thread in group.threads.items():
            assert thread.others[-1] == f"after {steps} steps", rank
        assert not any(each.holder().list() for each in (leader, *group.adapters.values()))


async def test_a_rank_that_leaves_is_reported_and_one_that_is_gone_ends_the_group() -> None:
    async with group_of(3) as group:
        for rank in (1, 2):
            group.follow(rank)
        await asyncio.wrap_future(group.leader.place)
        await until(lambda: all(follower.place.done() for follower in group.followers.values()))
        leaving = asyncio.create_task(group.followers[1].leave(DEADLINE_S))
        await until(lambda: group.num_leaving)
        assert group.lost == []
        leaving.cancel()
        group.followers[2]._writer.close()  # type: ignore[union-attr]
        await until(lambda: any("rank 2" in lost and "is gone" in lost for lost in group.lost))


async def test_a_silent_rank_is_noticed() -> None:
    async with group_of(2) as group:
        follower = group.follow(1)
        await asyncio.wrap_future(group.leader.place)
        await until(lambda: follower.place.done())
        group.leader._liveness.tighten()  # type: ignore[union-attr]
        follower._liveness._beat = lambda: None  # type: ignore[method-assign]
        await until(
            lambda: any("rank 1" in lost and "has been silent for 1 s" in lost for lost in group.lost)
        )


async def test_a_rank_that_reads_late_that_the_group_ends_takes_it_for_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_read, read = asyncio.Event(), follower_module.read_frame

    async def read_late(reader: asyncio.StreamReader) -> bytes:
        frame = await read(reader)
        await may_read.wait()
        return frame

    monkeypatch.setattr(follower_module, "read_frame", read_late)
    async with group_of(3) as group:
        for rank in (1, 2):
            group.follow(rank)
        await until(lambda: all(follower.place.done() for follower in group.followers.values()))
        beats = [0, 0]
        for rank, follower in group.followers.items():
            beat = follower._liveness._beat

            def counted(rank: int = rank, beat: Callable[[], None] = beat) -> None:
                beats[rank - 1] += 1
                beat()

            follower._liveness._beat = counted  # type: ignore[method-assign]
        leaving = asyncio.create_task(group.leader.leave())
        await until(lambda: min(beats) >= 3)
        assert not leaving.done()
        assert group.lost == []
        may_read.set()
        await leaving
        assert all(follower.has_left.is_set() for follower in group.followers.values())
        assert group.lost == []


@pytest.mark.thorough
async def test_ranks_that_do_not_come_are_named() -> None:
    async with group_of(4, timeout_s=4.0) as group:
        group.follow(2)
        with pytest.raises(RankUnavailable, match=r"waited 4 s \(parallel.timeout_s\) for ranks \[1, 3\]"):
            await asyncio.wrap_future(group.leader.place)
        with pytest.raises(RankUnavailable, match=r"rank 2 of 4 waited 4 s .* for the group"):
            await asyncio.wrap_future(group.followers[2].place)


async def test_who_is_no_rank_of_the_group_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_REFUSED_S", 0.2)
    async with group_of(3) as group:
        stranger = group.follow(1, tensor_parallel_size=4)
        with pytest.raises(HandshakeMismatch, match="the leader has 3 ranks, and this rank 4"):
            await asyncio.wrap_future(stranger.place)
        group.follow(1)
        await until(lambda: 1 in group.leader._followers)
        second = group.follow(1)
        with pytest.raises(ConfigError, match=r"rank 1 of this group \(generation g\) has joined already"):
            await asyncio.wrap_future(second.place)


async def test_an_address_that_is_none_is_refused() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, rendezvous_address="nowhere")
    leader = GroupLeader(parallel, generation="g", on_leaving=lambda: None)
    with pytest.raises(ConfigError, match=r"parallel.rendezvous_address: 'nowhere' is not host:port"):
        await leader.open()
