"""Records into a journal every call that can change an engine core, and every step that it decides."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.types.journal import Closed, JournalEvent, JournalHeader, Planned
from triptych.wire.journal import JOURNAL_SUFFIX, event_to_bytes, framed, header_to_bytes
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.journal.listener import EngineListener

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

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    @property
    def oldest_at_ms(self) -> int:
        return self._file.oldest_at_ms

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
    config: EngineConfig, started_at_ms: int, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """Return the engine core of a config, with a journal if `journal.path` is set.

    Args:
        config: Options of the whole process.
        started_at_ms: Unix time at the engine's start, which distinguishes the journals of several runs.
        clock: Monotonic time in seconds.
    """
    if not config.journal.path:
        return EngineCore(config, clock)
    header = JournalHeader(
        engine_id=config.engine.engine_id,
        started_at_ms=started_at_ms,
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


log = logging.getLogger(__name__)

BUFFER_BYTES = 256 << 10
_FLUSH_S = 1.0
_CLOSING_BYTES = 256  # kept free for the record that says why a recording ends


class _EarlierJournal(NamedTuple):
    """The journal of an earlier run."""

    started_at_ms: int
    """Unix time of the run's start."""
    path: Path
    num_bytes: int


class JournalFile:
    """The journal of one run. The engine's listener owns it.

    Recording never hurts serving: an error ends the recording with one line in the log.

    A replay has to begin where an engine begins, without requests, so no part of a run can be dropped. To stay within
    the limit, the journals of this engine's earlier runs are deleted, oldest first; then the recording ends.
    """

    def __init__(self, directory: Path, max_bytes: int, header: JournalHeader) -> None:
        """Prepare a journal. The first event creates its file, so an engine that cannot start leaves none.

        Args:
            directory: Directory of this engine's journals; others may use it too.
            max_bytes: Most bytes of all of this engine's journals together.
            header: Begins the file.
        """
        self.state = "recording"
        """One of recording, full, failed and closed."""
        self._directory = directory
        self._stem = quote(header.engine_id, safe="")
        self._path = directory / f"{self._stem}-{header.started_at_ms}{JOURNAL_SUFFIX}"
        self._max_bytes = max_bytes
        self._header = header
        self._file: BufferedWriter[FileIO] | None = None
        self._earlier: deque[_EarlierJournal] = deque()
        """Journals of earlier runs, oldest first."""
        self.num_bytes = 0
        """Bytes of this journal and of all earlier ones."""
        self._flushed_at_s = 0.0

    @property
    def is_recording(self) -> bool:
        return self.state == "recording"

    @property
    def oldest_at_ms(self) -> int:
        """Unix time of the start of the earliest run with a journal. 0: none has one."""
        if self._earlier:
            return self._earlier[0].started_at_ms
        return self._header.started_at_ms if self.num_bytes else 0

    def write(self, event: JournalEvent) -> None:
        """Append one event, unless the recording has ended."""
        if not self.is_recording:
            return
        try:
            if self._file is None:
                self._file = self._create()
            data = framed(event_to_bytes(event))
            if not self._has_space(len(data) + _CLOSING_BYTES):
                self._end("full", _closing(event.at_s, "journal.max_bytes is reached"))
                log.warning(
                    "journal %s: journal.max_bytes of %d is reached; this run is recorded no further",
                    self._path,
                    self._max_bytes,
                )
                return
            self._file.write(data)
            self.num_bytes += len(data)
            if event.at_s - self._flushed_at_s > _FLUSH_S:
                self._file.flush()
                self._flushed_at_s = event.at_s
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Hand what is buffered to the system. Called when nothing else is to be done."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self, at_s: float) -> None:
        """End the recording, because the run is over."""
        try:
            if self._file is not None:
                self._end("closed", _closing(at_s, "the engine stopped"))
        except OSError as error:
            self._fail(error)

    def _create(self) -> BufferedWriter[FileIO]:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._find_earlier()
        file = BufferedWriter(FileIO(self._path, "x", opener=_open_private), BUFFER_BYTES)
        data = framed(header_to_bytes(self._header))
        file.write(data)
        self.num_bytes += len(data)
        log.info("recording steps into %s", self._path)
        return file

    def _find_earlier(self) -> None:
        """Find this engine's earlier journals. Other engines may share the directory."""
        starts = []
        for path in self._directory.glob(f"*{JOURNAL_SUFFIX}"):
            stem, _, text = path.stem.rpartition("-")
            if stem == self._stem and text.isdecimal():
                starts.append((int(text), path))
        for start, path in sorted(starts):
            earlier = _EarlierJournal(start, path, path.stat().st_size)
            self._earlier.append(earlier)
            self.num_bytes += earlier.num_bytes

    def _has_space(self, num_bytes: int) -> bool:
        while self.num_bytes + num_bytes > self._max_bytes and self._earlier:
            oldest = self._earlier.popleft()
            oldest.path.unlink(missing_ok=True)
            self.num_bytes -= oldest.num_bytes
        return self.num_bytes + num_bytes <= self._max_bytes

    def _end(self, state: str, last_record: bytes) -> None:
        assert self._file is not None
        self._file.write(last_record)
        self.num_bytes += len(last_record)
        self._file.close()
        self._file, self.state = None, state

    def _fail(self, error: OSError) -> None:
        self.state = "failed"
        if self._file is not None:
            with suppress(OSError):  # one is enough to know
                self._file.raw.close()  # not the buffered one: that would write again what could not be written
            self._file = None
        log.warning("journal %s: %s; this run is recorded no further", self._path, error.strerror or error)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user may read: it holds prompts and answers."""
    return os.open(path, flags, 0o600)


def _closing(at_s: float, reason: str) -> bytes:
    return framed(event_to_bytes(JournalEvent(at_s, Closed(reason))))
