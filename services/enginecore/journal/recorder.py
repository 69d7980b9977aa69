"""Records into a journal every call that can change an engine core, and every step that it decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from services.enginecore.engine import EngineCore
from services.enginecore.journal.file import JournalFile
from services.enginecore.journal.listener import EngineListener
from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.types.journal import JournalEvent, JournalHeader, Planned

_READERS = {"enginecore", "worker"}


class JournalRecorder(EngineListener):
    """Writes the events of an engine core to a file."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._was_idle = False
        """Whether the last event was a plan of nothing. Further ones are left out: they change nothing."""

    @property
    def state(self) -> str:
        """One of recording, full, failed and closed."""
        return self._file.state

    def on_event(self, event: JournalEvent) -> None:
        is_idle = isinstance(event.what, Planned) and event.what.plan is None
        if not (is_idle and self._was_idle):
            self._file.write(event)
        self._was_idle = is_idle
        if is_idle:
            self._file.flush()

    def close(self, at_s: float) -> None:
        self._file.close(at_s)


def create_engine(
    config: EngineConfig, epoch: int, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """Return the engine core of a config, with a journal if `journal.path` is set.

    Args:
        config: Options of the whole process.
        epoch: Unix ms at the engine's start.
        clock: Monotonic time in seconds.
    """
    if not config.journal.path:
        return EngineCore(config, clock)
    header = JournalHeader(
        engine_id=config.engine.engine_id,
        epoch=epoch,
        engine_version=metadata.version("triptych"),
        config=recorded_config(config),
    )
    file = JournalFile(Path(config.journal.path), config.journal.max_bytes, header)
    return EngineCore(config, clock, JournalRecorder(file))


def recorded_config(config: EngineConfig) -> dict[str, str]:
    """Return key to text of every option that an engine or a worker reads, except those of the journal itself."""
    return {
        option.key: str(getattr(getattr(config, option.leaf), option.name))
        for option in iter_options()
        if _READERS.intersection(option.limits.read_by) and option.leaf != "journal"
    }
