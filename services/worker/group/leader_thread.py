"""The leader's runner thread: whatever it is given is relayed to the followers first, in the same order."""

from __future__ import annotations

from collections.abc import Callable

from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan
from triptych.wire.admin import sleep_level_to_proto
from triptych.wire.step import Step
from triptych_services.worker.group.leader import GroupLeader
from triptych_services.worker.group.messages import LeaderMessage
from triptych_services.worker.runner.base import PhaseChange, Runner, do_nothing
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
