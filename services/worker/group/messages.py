"""The messages between a leader and its followers, on asyncio's streams: group.proto."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import group_pb2

PROTOCOL = 1
"""Version of what ranks send each other. All of them run the same release."""
MAX_MESSAGE_BYTES = 80 << 20
"""A step has 64 MiB at most."""
_LENGTH_BYTES = 4

FollowerMessage = group_pb2.FollowerMessage
LeaderMessage = group_pb2.LeaderMessage
M = TypeVar("M", bound=Message)


def to_frame(message: Message) -> bytes:
    """Return a message behind its length."""
    body = message.SerializeToString()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message with its length before it.

    Raises:
        asyncio.IncompleteReadError, OSError: The connection has ended.
        ProtocolViolation: The other side is no rank of ours.
    """
    head = await reader.readexactly(_LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"a message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return head + await reader.readexactly(length)


def parse_frame(frame: bytes, kind: type[M]) -> M:
    """Return the message of a frame. Raises ProtocolViolation if it is none of this kind."""
    message = kind()
    try:
        message.ParseFromString(memoryview(frame)[_LENGTH_BYTES:].tobytes())
    except DecodeError as error:
        raise ProtocolViolation(f"not a {kind.__name__}: {error}") from None
    return message


async def read_message(reader: asyncio.StreamReader, kind: type[M]) -> M:
    """Read one message; raises as `read_frame` and `parse_frame` do."""
    return parse_frame(await read_frame(reader), kind)
