"""The bytes between two workers: one request, then frames until all blocks have been sent.

    puller   request: layout, lease, first index, number of blocks ──►
    server   ◄── chunk chunk … waiting … chunk | refused | busy: ask again

Everything is little-endian. The head of each message has a checksum over itself, and the content one of its own.
"""

from __future__ import annotations

import socket
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

PROTOCOL = b"TRIPKV01"
CHUNK_BYTES = 1 << 20
"""Bytes of content in one frame, at most."""
WAITING_S = 1.0
"""Seconds after which a server that has nothing to send says that it is alive."""
SILENCE_S = 3.0
"""Seconds without a frame after which a puller gives up, and without progress after which a server does."""
MAX_REASON_BYTES = 1 << 12

_REQUEST = struct.Struct("<8s32s16sII")
_HEAD = struct.Struct("<BIII16sI")
_CHECKSUM = struct.Struct("<I")
REQUEST_BYTES = _REQUEST.size + _CHECKSUM.size
HEAD_BYTES = _HEAD.size + _CHECKSUM.size


class FrameKind(IntEnum):
    """The purpose of a frame."""

    CHUNK = 1
    """Its content is a part of a block."""
    WAITING = 2
    """The next block is not computed yet."""
    REFUSED = 3
    """No more will come; its content says why."""
    SPOILED = 4
    """The same, and what was sent is wrong as well."""
    BUSY = 5
    """There is no place for this pull now. The connection ends, and the puller may ask again."""


class BrokenFrame(Exception):
    """Bytes that are no message, or not the one that was sent."""


class ConnectionEnded(BrokenFrame):
    """The other side has closed the connection, or is gone."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """The blocks that a puller asks for."""

    layout: bytes
    """32 bytes."""
    lease: bytes
    """16 bytes."""
    first_index: int
    num_blocks: int

    def to_bytes(self) -> bytes:
        head = _REQUEST.pack(PROTOCOL, self.layout, self.lease, self.first_index, self.num_blocks)
        return head + _CHECKSUM.pack(zlib.crc32(head))

    @classmethod
    def from_bytes(cls, message: bytes) -> PullRequest:
        """Read a request. Raises BrokenFrame."""
        _check(message, _REQUEST.size)
        protocol, layout, lease, first_index, num_blocks = _REQUEST.unpack_from(message)
        if protocol != PROTOCOL:
            raise BrokenFrame(f"protocol {protocol!r}, this is {PROTOCOL!r}")
        return cls(layout, lease, first_index, num_blocks)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a frame, which precedes its content."""

    kind: FrameKind
    index: int = 0
    """Index of the block in its prompt."""
    offset: int = 0
    """Byte of the block that the content begins at."""
    num_bytes: int = 0
    """Bytes of content."""
    block_hash: bytes = bytes(16)
    checksum: int = 0
    """CRC-32 of the content."""

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(self.kind, self.index, self.offset, self.num_bytes, self.block_hash, self.checksum)
        return head + _CHECKSUM.pack(zlib.crc32(head))

    @classmethod
    def from_bytes(cls, message: bytes | bytearray | memoryview) -> FrameHead:
        """Read a head. Raises BrokenFrame."""
        _check(message, _HEAD.size)
        kind, index, offset, num_bytes, block_hash, checksum = _HEAD.unpack_from(message)
        if kind not in set(FrameKind) or num_bytes > CHUNK_BYTES:
            raise BrokenFrame(f"a frame of kind {kind} with {num_bytes} bytes")
        return cls(FrameKind(kind), index, offset, num_bytes, block_hash, checksum)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer. Raises ConnectionEnded if the connection ends before, TimeoutError as its socket says."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if not count:
            raise ConnectionEnded("the connection has ended")
        received += count


def checksum_of(content: memoryview) -> int:
    """Return the checksum of a frame's content."""
    return zlib.crc32(content)


def _check(message: bytes | bytearray | memoryview, size: int) -> None:
    if _CHECKSUM.unpack_from(message, size)[0] != zlib.crc32(memoryview(message)[:size]):
        raise BrokenFrame("the checksum of a head is wrong")
