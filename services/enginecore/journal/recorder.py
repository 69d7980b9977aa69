"""An engine core that keeps a journal: every call that can change it, and every step that it decides.

Time stands still within a call: the clock is read once, and the reading is recorded. So the calls and their
times are all that a replay needs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from services.enginecore.engine import EngineCore
from services.enginecore.journal.file import JournalFile
from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.types.facts import EngineStatus, PauseMode, WorkerFacts
from triptych.types.journal import (
    Aborted,
    CacheReset,
    Expired,
    JournalEvent,
    JournalHeader,
    Paused,
    Planned,
    ResultTaken,
    Resumed,
    SessionClosed,
    SessionOpened,
    Submitted,
    What,
    WorkerGone,
    WorkerReady,
)
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import SubmitRequest

_READERS = {"enginecore", "worker"}


def create_engine(config: EngineConfig, epoch: int) -> EngineCore:
    """The engine core of this config; it keeps a journal if `journal.path` is set. `epoch`: Unix ms now."""
    if not config.journal.path:
        return EngineCore(config)
    header = JournalHeader(
        engine_id=config.engine.engine_id,
        epoch=epoch,
        engine_version=metadata.version("triptych"),
        config=recorded_config(config),
    )
    file = JournalFile(Path(config.journal.path), config.journal.max_bytes, header)
    return JournaledEngine(config, file)


def recorded_config(config: EngineConfig) -> dict[str, str]:
    """Key to text of every option that an engine or a worker reads, but where the journal goes."""
    return {
        option.key: str(getattr(getattr(config, option.leaf), option.name))
        for option in iter_options()
        if _READERS.intersection(option.limits.read_by) and option.leaf != "journal"
    }


class FrozenClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class JournaledEngine(EngineCore):
    """Each call is recorded before it is carried out, but for plans, which are recorded when they are made."""

    def __init__(
        self, config: EngineConfig, file: JournalFile, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._frozen_clock = FrozenClock()
        self._real_clock = clock
        self._file = file
        self._was_idle = False
        """Nothing has been recorded since a plan found nothing to compute, and no requests."""
        super().__init__(config, self._frozen_clock)

    def worker_ready(self, facts: WorkerFacts, *, after_crash: bool) -> None:
        self._record(WorkerReady(facts, after_crash))
        super().worker_ready(facts, after_crash=after_crash)

    def worker_lost(self) -> None:
        self._record(WorkerGone())
        super().worker_lost()

    def open_session(self, session: int) -> None:
        self._record(SessionOpened(session))
        super().open_session(session)

    def close_session(self, session: int) -> None:
        self._record(SessionClosed(session))
        super().close_session(session)

    def submit(self, session: int, submit: SubmitRequest) -> None:
        self._record(Submitted(session, submit))
        super().submit(session, submit)

    def abort(self, session: int, number: int) -> None:
        self._record(Aborted(session, number))
        super().abort(session, number)

    def expire(self) -> None:
        if self.num_requests:  # else nothing can expire: an engine that waits for its worker writes nothing
            self._record(Expired())
        super().expire()

    def plan(self) -> StepPlan | None:
        self._frozen_clock.now_s = self._real_clock()
        try:
            plan = super().plan()
        except Exception:
            self._write(Planned(None))  # replayed, it dies of the same
            raise
        is_idle = plan is None and not self.num_requests
        if not (is_idle and self._was_idle):  # an idle engine is asked at each turn of the loop
            self._write(Planned(plan))
        self._was_idle = is_idle
        if plan is None:
            self._file.flush()
        return plan

    def apply(self, result: StepResult) -> None:
        self._record(ResultTaken(result))
        super().apply(result)

    def reset_prefix_cache(self) -> int:
        self._record(CacheReset())
        return super().reset_prefix_cache()

    def pause(self, mode: PauseMode) -> None:
        self._record(Paused(mode))
        super().pause(mode)

    def resume(self) -> None:
        self._record(Resumed())
        super().resume()

    def status(self, *, ready: bool, why_not_ready: str, steps_in_flight: int) -> EngineStatus:
        status = super().status(ready=ready, why_not_ready=why_not_ready, steps_in_flight=steps_in_flight)
        return dataclasses.replace(status, journal=self._file.state)

    def close(self) -> None:
        self._file.close(self._real_clock())
        super().close()

    def _record(self, what: What) -> None:
        self._frozen_clock.now_s = self._real_clock()
        self._write(what)

    def _write(self, what: What) -> None:
        self._was_idle = False
        self._file.write(JournalEvent(self._frozen_clock.now_s, what))
