"""Each call has a request id: the client's or a new one, in the answer, in errors and in the log."""

from __future__ import annotations

import logging
import uuid

import grpc
import grpc.aio
import pytest

from triptych.admin.v1 import admin_pb2
from triptych.rpc.interceptors import REQUEST_ID_KEY, current_request_id, sent_request_id, set_request_id

MINE = ((REQUEST_ID_KEY, "mine"),)


def answered(metadata: grpc.aio.Metadata | None) -> str | None:
    return None if metadata is None else metadata.get(REQUEST_ID_KEY)


async def test_client_s_id_is_answered(serve) -> None:
    async with serve() as running:
        unary = running.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=MINE)
        assert answered(await unary.initial_metadata()) == "mine"
        stream = running.admin.WatchStatus(admin_pb2.WatchStatusRequest(), metadata=MINE)
        assert [response.status.engine_id async for response in stream] == ["first", "last"]
        assert answered(await stream.initial_metadata()) == "mine"


async def test_call_without_an_id_gets_a_new_one(serve) -> None:
    async with serve() as running:
        ids = []
        for _ in range(2):
            call = running.admin.GetStatus(admin_pb2.GetStatusRequest())
            ids.append(uuid.UUID(answered(await call.initial_metadata())))
        assert ids[0] != ids[1]
        assert ids[0].version == 7


async def test_id_comes_with_an_error_and_not_before_it(serve, caplog) -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    async with serve(fail) as running:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=MINE)
        # A call that has had initial metadata is never retried by gRPC.
        assert answered(caught.value.initial_metadata()) is None
        assert answered(caught.value.trailing_metadata()) == "mine"
        assert "(request mine)" in caught.value.details()
        assert "(request mine)" in caplog.text


async def test_calls_made_for_a_call_carry_its_id(serve) -> None:
    seen: list[str] = []

    async def note() -> None:
        seen.append(current_request_id())

    async with serve(note) as running:
        set_request_id("outer")
        await running.admin.GetStatus(admin_pb2.GetStatusRequest())
        set_request_id("")
        await running.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert seen[0] == "outer"
    assert seen[1] not in ("", "outer")


def test_long_ids_are_cut() -> None:
    assert sent_request_id(((REQUEST_ID_KEY, "x" * 1000),)) == "x" * 128
    assert sent_request_id((("other", "y"),)) == ""
    assert sent_request_id(None) == ""
