"""Messages that wait for a session's stream, and for the client's acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from triptych.errors import EngineFailure, ProtocolViolation
from triptych.rpc.session.outbox import Outbox


def filled(*messages: int, **limits: int) -> Outbox[int, str]:
    """Return an outbox whose messages are their own numbers."""
    outbox: Outbox[int, str] = Outbox(**limits)
    put(outbox, *messages)
    return outbox


def put(outbox: Outbox[int, str], *messages: int) -> None:
    for message in messages:
        outbox.put(message)


async def take(messages: AsyncIterator[int | str], count: int) -> list[int | str]:
    async with asyncio.timeout(60):
        return [await anext(messages) for _ in range(count)]


async def rest(messages: AsyncIterator[int | str]) -> list[int | str]:
    async with asyncio.timeout(60):
        return [message async for message in messages]


async def test_messages_before_close_come_in_order() -> None:
    outbox = filled(1, 2, 3)
    outbox.close()
    put(outbox, 4)
    assert await rest(outbox.messages()) == [1, 2, 3]


async def test_close_error_follows_pending_messages() -> None:
    outbox = filled(1, 2)
    outbox.close(ProtocolViolation("no hello"))
    messages = outbox.messages()
    assert await take(messages, 2) == [1, 2]
    with pytest.raises(ProtocolViolation, match="no hello"):
        await anext(messages)


async def test_newer_stream_begins_behind_what_is_confirmed() -> None:
    outbox = filled(1, 2, 3)
    first = outbox.messages()
    assert await take(first, 2) == [1, 2]
    outbox.confirm(1)
    second = outbox.messages()
    assert await take(second, 2) == [2, 3]
    with pytest.raises(ProtocolViolation, match="a newer stream"):
        await anext(first)
    put(outbox, 4)
    assert await take(second, 1) == [4]


async def test_newer_stream_ends_one_that_waits() -> None:
    outbox = filled()
    waiting = asyncio.ensure_future(rest(outbox.messages()))
    await asyncio.sleep(0)
    second = outbox.messages()
    with pytest.raises(ProtocolViolation, match="a newer stream"):
        await waiting
    put(outbox, 1)
    assert await take(second, 1) == [1]


async def test_stopped_stream_ends_and_messages_gather() -> None:
    outbox = filled()
    waiting = asyncio.ensure_future(rest(outbox.messages()))
    await asyncio.sleep(0)
    outbox.stop_reading()
    put(outbox, 1, 2)
    assert await waiting == []
    assert await take(outbox.messages(), 2) == [1, 2]


async def test_stopped_stream_raises_its_error() -> None:
    outbox = filled()
    messages = outbox.messages()
    outbox.stop_reading(ProtocolViolation("a gap"))
    with pytest.raises(ProtocolViolation, match="a gap"):
        await anext(messages)
    assert outbox.can_resume_after(0)


async def test_confirmed_messages_cannot_be_had_again() -> None:
    outbox = filled(1, 2, 3, 4)
    outbox.confirm(2)
    assert [outbox.can_resume_after(number) for number in range(6)] == [False] * 2 + [True] * 3 + [False]
    outbox.confirm(4)
    put(outbox, 5)
    assert await take(outbox.messages(), 1) == [5]
    outbox.close()
    assert not outbox.can_resume_after(4)


async def test_latest_notice_comes_before_messages() -> None:
    outbox = filled(1)
    outbox.notify("old")
    outbox.notify("new")
    messages = outbox.messages()
    assert await take(messages, 2) == ["new", 1]
    outbox.notify("newer")
    assert await take(messages, 1) == ["newer"]


async def test_repeated_message_is_sent_again_while_kept() -> None:
    outbox = filled(1, 2)
    messages = outbox.messages()
    await take(messages, 2)
    for number in (1, 2, 3):
        outbox.repeat(number)
    outbox.confirm(1)
    put(outbox, 3)
    assert await take(messages, 2) == [3, 2]


async def test_confirmations_make_room() -> None:
    outbox = filled(max_messages=8)
    for first in range(1, 100, 4):
        put(outbox, *range(first, first + 4))
        outbox.confirm(first + 3)
    assert not outbox.is_overrun


@pytest.mark.parametrize("limits", [{"max_messages": 3}, {"max_bytes": 29}], ids=["messages", "bytes"])
async def test_client_too_far_behind_gets_nothing_more(limits: dict[str, int]) -> None:
    outbox: Outbox[int, str] = Outbox(**limits)
    for number in range(1, 5):
        assert not outbox.is_overrun
        outbox.put(number, num_bytes=10)
    assert outbox.is_overrun
    assert not outbox.can_resume_after(0)
    outbox.notify("too late")
    outbox.close()
    with pytest.raises(EngineFailure, match=r"more than \d+ messages or \d+ bytes behind"):
        await rest(outbox.messages())
