"""Replays a journal's events into an engine core and compares its plans with the recorded ones."""

from __future__ import annotations

from dataclasses import dataclass

from tools.replay.journal_rows import RowNames
from tools.replay.plan_difference import differences_between, is_same
from triptych.config import EngineConfig
from triptych.config.loader import load_config
from triptych.errors import TriptychError
from triptych.types.journal import (
    Aborted,
    AdapterGone,
    AdaptersAwaited,
    CacheReset,
    Closed,
    Expired,
    JournalEvent,
    KvProgressed,
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
    WorkerRefused,
)
from triptych.types.step import StepPlan
from triptych.wire.journal import JournalReader
from triptych_services.enginecore.engine import EngineCore


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first event that does not come out as it did; what follows it would mean nothing."""

    event_number: int
    """From 1; the header is none."""
    at_s: float
    """Since the first event."""
    what: str
    details: tuple[str, ...] = ()
    """Each field that differs, recorded and now."""
    requests: tuple[str, ...] = ()
    """Ids of the requests concerned."""

    def __str__(self) -> str:
        lines = [f"event {self.event_number}, {self.at_s:.6f} s after the first: {self.what}"]
        lines += [f"  {detail}" for detail in self.details]
        if self.requests:
            lines.append(f"  requests: {', '.join(self.requests)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a journal."""

    num_steps: int
    num_requests: int
    divergence: Divergence | None
    ending: str
    """How the recording ended, where the replay got there."""

    def __str__(self) -> str:
        if self.divergence is not None:
            return str(self.divergence)
        return f"{self.num_steps} steps, {self.num_requests} requests: no divergence ({self.ending})"


def replay(journal: JournalReader) -> Replay:
    """Run a whole journal, or up to the first divergence.

    Raises:
        ConfigError: the file is damaged, or its config is none of this version's.
    """
    replayer = _Replayer(load_config(env={}, flags=journal.header.config))
    ending = "the recording has no end: the engine died, or still runs"
    for number, event in enumerate(journal, start=1):
        if isinstance(event.what, Closed):
            ending = f"the recording ended: {event.what.reason}"
        elif (divergence := replayer.take(number, event)) is not None:
            return Replay(replayer.num_steps, replayer.num_requests, divergence, "")
    if journal.is_cut:
        ending += "; its last record is cut off"
    return Replay(replayer.num_steps, replayer.num_requests, None, ending)


class _Replayer:
    """An engine core, its clock, and the names of its requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.num_steps = self.num_requests = 0
        self._at_s = 0.0
        self._engine = EngineCore(config, lambda: self._at_s)
        self._names = RowNames()
        self._started_s: float | None = None

    def take(self, number: int, event: JournalEvent) -> Divergence | None:
        """Let one event happen again."""
        if self._started_s is None:
            self._started_s = event.at_s
        self._at_s = event.at_s
        at_s = event.at_s - self._started_s
        try:
            if isinstance(event.what, Planned):
                recorded, now = event.what.plan, self._engine.plan()
                return (
                    None
                    if self._is_as_it_was(recorded, now)
                    else self._divergence(number, at_s, recorded, now)
                )
            self._tell(event.what)
        except TriptychError:
            pass  # a refusal: it changes nothing
        except Exception as error:  # a bug of the engine's: found again, if the recorded run died of it
            name = type(event.what).__name__
            return Divergence(number, at_s, f"{name} raises {type(error).__name__}: {error}")
        self._engine.take_outputs()  # they would pile up
        return None

    def _is_as_it_was(self, recorded: StepPlan | None, now: StepPlan | None) -> bool:
        if recorded is not None:
            self.num_steps += 1
        if not is_same(recorded, now):
            return False
        if recorded is not None:
            self._names.note_rows(recorded.new_rows)
        return True

    def _divergence(
        self, number: int, at_s: float, recorded: StepPlan | None, now: StepPlan | None
    ) -> Divergence:
        differences = differences_between(recorded, now)
        slots = sorted({slot for difference in differences for slot in difference.slots})
        plans = [plan for plan in (recorded, now) if plan is not None]
        entering = [row for plan in plans for row in plan.new_rows if row.slot in slots or len(plans) == 1]
        names = [self._names.name_of(row) for row in entering]
        names += [self._names.in_slot(slot) for slot in slots if slot not in {row.slot for row in entering}]
        return Divergence(
            number,
            at_s,
            f"step {plans[0].step_id} is not what it was",
            tuple(map(str, differences)),
            tuple(dict.fromkeys(names)),
        )

    def _tell(self, what: What) -> None:
        engine = self._engine
        match what:
            case ResultTaken(result):
                engine.apply(result)
            case Expired():
                engine.expire()
            case Submitted(session, request):
                self.num_requests += 1
                self._names.note_submit(request)
                engine.frontends.submit(session, request)
            case Aborted(session, number):
                engine.frontends.abort(session, number)
            case SessionOpened(session):
                engine.frontends.open_session(session)
            case SessionClosed(session):
                engine.frontends.close_session(session)
            case WorkerReady(facts, after_crash):
                engine.worker_ready(facts, after_crash=after_crash)
            case WorkerGone():
                engine.worker_lost()
            case WorkerRefused(why):
                engine.worker_refused(why)
            case CacheReset():
                engine.reset_prefix_cache()
            case KvProgressed(progress):
                engine.note_kv_progress(progress)
            case AdaptersAwaited(digests):
                engine.adapters.keep_waiting(digests)
            case AdapterGone(digest, why):
                engine.adapters.fail(digest, why)
            case Paused(mode):
                engine.pause(mode)
            case Resumed():
                engine.resume()
            case _:
                raise AssertionError(f"{what} happens to no engine")
