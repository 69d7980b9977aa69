"""Where one frontend's batches wait."""

from __future__ import annotations

import pytest

from services.enginecore.outbox import MAX_PENDING, Outbox
from triptych.errors import EngineFailure, ProtocolViolation
from triptych.types.outputs import OutputBatch


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


async def test_the_reason_of_the_end_follows_what_was_pending() -> None:
    outbox, got = Outbox(), []
    put(outbox, 1, 2)
    outbox.close(ProtocolViolation("no hello"))
    with pytest.raises(ProtocolViolation, match="no hello"):
        await drain(outbox, got)
    assert got == [1, 2]


async def test_a_reader_too_far_behind_gets_nothing_after_the_gap() -> None:
    outbox, got = Outbox(), []
    put(outbox, *range(MAX_PENDING + 100))
    assert outbox.is_overrun
    outbox.close()
    with pytest.raises(EngineFailure, match=f"more than {MAX_PENDING}"):
        await drain(outbox, got)
    assert got == []
