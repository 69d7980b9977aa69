"""Where one frontend's batches wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from services.enginecore.frontends import outbox as outbox_module
from services.enginecore.frontends.outbox import MAX_PENDING, Outbox
from triptych.errors import EngineFailure, ProtocolViolation
from triptych.types.outputs import OutputBatch
from triptych.types.submit import EngineWelcome


def put(outbox: Outbox, *batch_ids: int) -> None:
    for batch_id in batch_ids:
        outbox.put(OutputBatch(batch_id))


async def drain(outbox: Outbox, batch_ids: list[int]) -> None:
    async for message in outbox.messages():
        assert isinstance(message, OutputBatch)
        batch_ids.append(message.batch_id)


async def test_what_was_put_before_the_end_comes_out_in_order() -> None:
    outbox, got = Outbox(), []
    put(outbox, 1, 2, 3)
    outbox.close()
    put(outbox, 4)
    await drain(outbox, got)
    assert got == [1, 2, 3]


async def test_batches_that_are_not_read_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 100_000)
    outbox = Outbox()
    token_ids = np.zeros(10_000, np.uint32)
    for batch_id in (1, 2):
        outbox.put(OutputBatch(batch_id, token_ids=token_ids))
    outbox.acknowledge(1)  # makes room
    outbox.put(OutputBatch(3, token_ids=token_ids))
    assert not outbox.is_overrun
    outbox.put(OutputBatch(4, token_ids=token_ids))
    assert outbox.is_overrun
    with pytest.raises(EngineFailure, match="or 100000 bytes behind"):
        await drain(outbox, [])


async def test_the_reason_of_the_end_follows_what_was_pending() -> None:
    outbox, got = Outbox(), []
    put(outbox, 1, 2)
    outbox.close(ProtocolViolation("no hello"))
    with pytest.raises(ProtocolViolation, match="no hello"):
        await drain(outbox, got)
    assert got == [1, 2]


async def take(reader: AsyncIterator[object], count: int) -> list[int]:
    return [(await anext(reader)).batch_id for _ in range(count)]  # type: ignore[attr-defined]


async def test_a_second_reader_begins_behind_what_is_acknowledged_and_the_first_ends() -> None:
    outbox = Outbox()
    put(outbox, 1, 2, 3)
    first = outbox.messages()
    assert await take(first, 2) == [1, 2]
    waiting = asyncio.ensure_future(drain_reader(first))
    outbox.acknowledge(1)
    second = outbox.messages()
    assert await take(second, 2) == [2, 3]
    assert await waiting == []
    put(outbox, 4)
    assert await take(second, 1) == [4]


async def drain_reader(reader: AsyncIterator[object]) -> list[object]:
    return [message async for message in reader]


async def test_a_reader_that_is_stopped_while_it_waits_ends_and_batches_gather() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(drain_reader(outbox.messages()))
    await asyncio.sleep(0)
    outbox.stop_reading()
    put(outbox, 1, 2)
    assert await waiting == []
    assert await take(outbox.messages(), 2) == [1, 2]


async def test_what_is_acknowledged_cannot_be_had_again() -> None:
    outbox = Outbox()
    assert outbox.can_resume_after(0)
    put(outbox, 1, 2, 3, 4)
    reader = outbox.messages()
    await take(reader, 4)
    outbox.acknowledge(2)
    assert [outbox.can_resume_after(batch_id) for batch_id in range(6)] == [False] * 2 + [True] * 3 + [False]
    outbox.acknowledge(4)
    assert [outbox.can_resume_after(batch_id) for batch_id in range(3, 6)] == [False, True, False]
    put(outbox, 5)
    assert await take(reader, 1) == [5]
    outbox.close()
    assert not outbox.can_resume_after(4)


async def test_of_several_welcomes_the_latest_is_sent_before_the_batches() -> None:
    outbox, old, new = Outbox(), EngineWelcome("e", 1, ready=False), EngineWelcome("e", 1, ready=True)
    put(outbox, 1)
    outbox.put(old)
    outbox.put(new)
    outbox.close()
    messages = [message async for message in outbox.messages()]
    assert messages[0] is new
    assert [message.batch_id for message in messages[1:]] == [1]


async def test_acknowledged_batches_leave_room() -> None:
    outbox = Outbox()
    for batch_id in range(1, 2 * MAX_PENDING, 64):
        put(outbox, *range(batch_id, batch_id + 64))
        outbox.acknowledge(batch_id + 63)
    assert not outbox.is_overrun


async def test_a_reader_too_far_behind_gets_nothing_after_the_gap() -> None:
    outbox, got = Outbox(), []
    put(outbox, *range(MAX_PENDING + 100))
    assert outbox.is_overrun
    outbox.close()
    with pytest.raises(EngineFailure, match=f"more than {MAX_PENDING}"):
        await drain(outbox, got)
    assert got == []
