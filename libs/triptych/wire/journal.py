"""journal.proto: the step journal's records, and reading a file of them.

file = length header (length event)*        each length a varint, as protobuf's own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError

from triptych.errors import ConfigError, TriptychError
from triptych.internal.v1 import journal_pb2
from triptych.types.journal import (
    Aborted,
    AdapterGone,
    AdaptersAwaited,
    CacheReset,
    Closed,
    Expired,
    JournalEvent,
    JournalHeader,
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
from triptych.wire import engine_core as engine_core  # its codecs are part of an event's
from triptych.wire import worker as worker
from triptych.wire.admin import pause_mode_from_proto, pause_mode_to_proto
from triptych.wire.codec import codec, fields_of, message_class
from triptych.wire.kv_transfer import progress_from_proto, progress_to_proto
from triptych.wire.result import result_from_proto, result_to_proto
from triptych.wire.step import plan_from_proto, plan_to_proto

JOURNAL_VERSION = 3
JOURNAL_SUFFIX = ".journal"
_MAGIC = "triptych-journal"
_MAX_RECORD_BYTES = 1 << 30  # a length beyond this is no length


Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


class JournalReader:
    """Reads one file: its header, then its events, once. `is_cut` is known when the last one has been read."""

    def __init__(self, path: Path) -> None:
        """Open a file, or the newest journal of a directory.

        Raises:
            ConfigError: there is no journal here, or not one of this version.
        """
        self.path = _newest(path) if path.is_dir() else path
        self.is_cut = False
        """The last record is not whole: its writer died, or has not yet written the rest."""
        self._offset = 0
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"journal {self.path}: {error.strerror or error}") from None
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[JournalEvent]:
        """Iterate over the events. Raises ConfigError with the place of damage; a cut end is none."""
        while True:
            start = self._offset
            try:
                record = self._read_record()
                if record is None:
                    return
                event = event_from_bytes(record)
            except (ValueError, TriptychError) as error:
                raise ConfigError(f"journal {self.path} is damaged at byte {start}: {error}") from None
            yield event

    def _read_header(self) -> JournalHeader:
        message = journal_pb2.JournalHeader()
        try:
            message.ParseFromString(self._read_record() or b"")
        except (ValueError, DecodeError):
            message.Clear()
        if message.magic != _MAGIC:
            raise ConfigError(f"journal {self.path}: this file is no step journal")
        if message.version != JOURNAL_VERSION:
            raise ConfigError(
                f"journal {self.path} has version {message.version}, this triptych reads {JOURNAL_VERSION}: "
                f"use triptych {message.engine_version}, which wrote it"
            )
        return JournalHeader(
            engine_id=message.engine_id,
            started_at_ms=message.started_at_ms,
            engine_version=message.engine_version,
            config=dict(message.config),
        )

    def _read_record(self) -> bytes | None:
        """Return the next record without its length; None at the end. Raises ValueError for a length that is none."""
        length = shift = 0
        while True:
            byte = self._file.read(1)
            if not byte:
                self.is_cut = shift > 0
                return None
            length |= (byte[0] & 0x7F) << shift
            shift += 7
            if length > _MAX_RECORD_BYTES:
                raise ValueError(f"a record of more than {_MAX_RECORD_BYTES} bytes")
            if byte[0] < 0x80:
                break
        record = self._file.read(length)
        if len(record) < length:
            self.is_cut = True
            return None
        self._offset += shift // 7 + length
        return record


def read_journal(path: Path) -> Iterator[JournalEvent]:
    """Iterate over the events of a file, or of the newest journal of a directory. Raises as `JournalReader` does."""
    with JournalReader(path) as journal:
        yield from journal


def framed(record: bytes) -> bytes:
    """Return a record with its length in front."""
    length, prefix = len(record), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + record


def header_to_bytes(header: JournalHeader) -> bytes:
    return bytes(
        journal_pb2.JournalHeader(
            magic=_MAGIC,
            version=JOURNAL_VERSION,
            started_at_ms=header.started_at_ms,
            engine_id=header.engine_id,
            engine_version=header.engine_version,
            config=header.config,
        ).SerializeToString()
    )


def event_to_bytes(event: JournalEvent) -> bytes:
    kind, encode = _KINDS[type(event.what)]
    if type(event.what) is Planned and event.what.plan is None:
        kind, encode = "no_step", lambda what: journal_pb2.JournalNoStep()
    message = journal_pb2.JournalEvent(at_s=event.at_s, **{kind: encode(event.what)})
    return bytes(message.SerializeToString())


def event_from_bytes(record: bytes) -> JournalEvent:
    """Read an event. Raises ValueError or ProtocolViolation for bytes that are no event."""
    try:
        message = journal_pb2.JournalEvent.FromString(record)
    except DecodeError as error:
        raise ValueError(f"a record that is no event: {error}") from None
    kind = message.WhichOneof("event")
    if kind is None:
        raise ValueError("an event of a kind that this version does not know")
    return JournalEvent(message.at_s, _DECODERS[kind](getattr(message, kind)))


def _create_kinds() -> tuple[dict[type[What], tuple[str, Encode]], dict[str, Decode]]:
    """Return the class of each event -> its field in a `JournalEvent` and its encoder; and field -> decoder."""
    as_it_is = (lambda value: value), (lambda value: value)
    with_one_field: dict[str, tuple[type[What], Encode, Decode]] = {
        "step": (Planned, plan_to_proto, plan_from_proto),
        "result": (ResultTaken, result_to_proto, result_from_proto),
        "session_opened": (SessionOpened, *as_it_is),
        "session_closed": (SessionClosed, *as_it_is),
        "paused": (Paused, pause_mode_to_proto, pause_mode_from_proto),
        "kv_progress": (KvProgressed, progress_to_proto, progress_from_proto),
        "closed": (Closed, *as_it_is),
    }
    """Events that are written as the value of their only field."""
    whole: dict[str, type[What]] = {
        "submit": Submitted,
        "abort": Aborted,
        "worker_ready": WorkerReady,
        "expire": Expired,
        "worker_lost": WorkerGone,
        "worker_refused": WorkerRefused,
        "cache_reset": CacheReset,
        "resumed": Resumed,
        "adapters_awaited": AdaptersAwaited,
        "adapter_gone": AdapterGone,
    }
    encoders: dict[type[What], tuple[str, Encode]] = {}
    decoders: dict[str, Decode] = {"no_step": lambda _: Planned(None)}
    for name, (cls, encode, decode) in with_one_field.items():
        encoders[cls], decoders[name] = (name, _inside(cls, encode)), _around(cls, decode)
    for name, cls in whole.items():
        made = codec(cls, message_class(journal_pb2.JournalEvent.DESCRIPTOR.fields_by_name[name]))
        encoders[cls], decoders[name] = (name, made.encode), made.decode
    return encoders, decoders


def _inside(cls: type[What], encode: Encode) -> Encode:
    """Return what encodes the only field of an event."""
    read_field = attrgetter(*fields_of(cls))
    return lambda what: encode(read_field(what))


def _around(cls: type[What], decode: Decode) -> Decode:
    """Return what makes an event of its only field."""
    create: Callable[..., What] = cls
    return lambda value: create(decode(value))


_KINDS, _DECODERS = _create_kinds()


def _newest(directory: Path) -> Path:
    """Return the journal of the engine that started last, by the time that ends its name."""
    journals = [path for path in directory.glob(f"*{JOURNAL_SUFFIX}") if _start_of(path) is not None]
    if not journals:
        raise ConfigError(f"journal {directory}: no *{JOURNAL_SUFFIX} in this directory")
    return max(journals, key=lambda path: _start_of(path) or 0)


def _start_of(path: Path) -> int | None:
    start = path.stem.rpartition("-")[2]
    return int(start) if start.isdecimal() else None
