"""The leader's runner thread and adapters: what they are given is relayed to the followers first, in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.config import EngineConfig
from triptych.errors import MemoryShort, ModelError
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan
from triptych.wire.admin import sleep_level_to_proto
from triptych.wire.step import Step
from triptych_services.worker.group.leader import GroupLeader
from triptych_services.worker.group.messages import LeaderMessage
from triptych_services.worker.runner.base import PhaseChange, Runner, do_nothing
from triptych_services.worker.service.adapters import RankAdapters
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.session_steps import Deliver


class LeaderThread(RunnerThread):
    """Owned by the leader's app. Relaying happens on the event loop, while the thread computes an earlier step."""

    def __init__(
        self,
        leader: GroupLeader,
        load: Callable[[PhaseChange], Runner],
        *,
        on_phase: PhaseChange,
        on_ready: Callable[[Runner], None],
    ) -> None:
        super().__init__(load, on_phase=on_phase, on_ready=on_ready, is_one_of_several=True)
        self._leader = leader

    def open_session(self, deliver: Deliver, on_open: Callable[[], None] = do_nothing) -> int:
        self._leader.relay(LeaderMessage(session_begins={}))
        return super().open_session(deliver, on_open)

    def submit(self, session: int, plan: StepPlan, message: Step) -> None:
        self._leader.relay(LeaderMessage(step=message))
        super().submit(session, plan, message)

    async def sleep(self, level: SleepLevel) -> int:
        """Have all ranks give their memory back, or none; return the sum of what they released."""
        call = self._leader.begin_call(sleep=sleep_level_to_proto(level))
        try:
            released_bytes = await super().sleep(level)
        finally:
            released_by_others = await self._leader.finish_call(call)
        return released_bytes + released_by_others

    async def wake(self) -> WorkerFacts:
        """Have all ranks take their memory again, or none; return the facts from now on."""
        call = self._leader.begin_call(wake=True)
        try:
            return await super().wake()
        finally:
            await self._leader.finish_call(call)


class LeaderAdapters(RankAdapters):
    """The adapters of all ranks, each of which has its share. Owned by the leader's event loop."""

    def __init__(
        self,
        leader: GroupLeader,
        config: EngineConfig,
        runner: Callable[[], Runner | None],
        thread: RunnerThread,
    ) -> None:
        super().__init__(config, runner, thread)
        self._leader = leader

    async def load(self, name: str, source: str) -> AdapterFacts:
        self.holder()
        call = self._leader.begin_call(load_adapter={"name": name, "source": source})
        own, others = await asyncio.gather(
            self.read(name, source), self._leader.answers_to(call), return_exceptions=True
        )
        if isinstance(others, BaseException):
            raise others
        digest = own.digest if isinstance(own, AdapterFacts) else ""
        refusals = [
            f"rank {rank} of its group: {answer.refusal or f'the files there have the digest {answer.digest}'}"
            for rank, answer in sorted(others.items())
            if answer.digest != digest
        ]
        keeps = isinstance(own, AdapterFacts) and not refusals
        settled = self._leader.begin_call(settle_adapter=keeps)
        self.settle(keeps=keeps)
        await self._leader.answers_to(settled)
        if isinstance(own, BaseException):
            raise own
        if refusals:
            why = f"adapter {name!r} with the digest {digest} is not loaded: {'; '.join(refusals)}"
            is_short = any(answer.is_memory_short for answer in others.values())
            raise MemoryShort(why) if is_short else ModelError(why)
        return own

    async def unload(self, digest: str) -> None:
        self.holder()
        call = self._leader.begin_call(unload_adapter=digest)
        await self.free(digest)
        await self._leader.answers_to(call)
