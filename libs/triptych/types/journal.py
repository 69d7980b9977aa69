"""Records of a step journal: the header of a run, and every event of its engine, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.types.facts import PauseMode, WorkerFacts
from triptych.types.kv_transfer import KvProgress
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import SubmitRequest


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """The run that a journal is of."""

    engine_id: str
    started_at_ms: int
    """Unix time."""
    engine_version: str
    """Version of the package, for readers."""
    config: Mapping[str, str]
    """Every option that an engine or a worker reads: key to text."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Steps were asked for."""

    plan: StepPlan | None
    """The step, or None if there was nothing to compute."""


@dataclass(frozen=True, slots=True)
class ResultTaken:
    """The oldest step's result came in."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Expired:
    """Requests out of time were ended, if there were any."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A frontend submitted a request."""

    session: int
    request: SubmitRequest


@dataclass(frozen=True, slots=True)
class Aborted:
    """A frontend aborted a request."""

    session: int
    number: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A frontend connected."""

    session: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A frontend is gone."""

    session: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker without rows welcomed the engine."""

    facts: WorkerFacts
    after_crash: bool
    """The last one died, so that something in flight may have killed it."""


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker was lost, and with it what was in flight."""


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """The worker does not serve this engine, which gave its requests back."""

    why: str


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The operator reset the prefix cache, or was refused."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The operator paused the engine."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resumed:
    """The operator ended the pause, if there was one."""


@dataclass(frozen=True, slots=True)
class KvProgressed:
    """The worker has reported how far transfers of KV blocks have come."""

    progress: KvProgress


@dataclass(frozen=True, slots=True)
class AdaptersAwaited:
    """The worker has other adapters in memory than before."""

    digests: tuple[str, ...]
    """Those that requests name and that it has not, or is to drop."""


@dataclass(frozen=True, slots=True)
class AdapterGone:
    """An adapter that requests name cannot be read again."""

    digest: str
    why: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The recording ended in order."""

    reason: str


What = (
    Planned
    | ResultTaken
    | Expired
    | Submitted
    | Aborted
    | SessionOpened
    | SessionClosed
    | WorkerReady
    | WorkerGone
    | WorkerRefused
    | CacheReset
    | Paused
    | Resumed
    | KvProgressed
    | AdaptersAwaited
    | AdapterGone
    | Closed
)


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """One call of the engine core."""

    at_s: float
    """Reading of the clock during the call, in seconds."""
    what: What
