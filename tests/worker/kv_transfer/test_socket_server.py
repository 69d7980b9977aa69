"""The server of KV blocks beside peers that mean no good: a puller that knows its lease always finds a place."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.worker.kv_transfer.test_socket_pull import (
    DEADLINE_S,
    LAYOUT,
    LEASE,
    Side,
    check_arrived,
    two_workers,
)
from triptych_services.worker.kv_transfer import socket_server
from triptych_services.worker.kv_transfer.frames import HEAD_BYTES, FrameHead, FrameKind, PullRequest
from triptych_services.worker.kv_transfer.socket_server import MAX_ASKING, MAX_UNKNOWN, MAX_UNKNOWN_PER_PEER


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever waits for a lease hear of it soon."""
    monkeypatch.setattr(socket_server, "WAITING_S", 0.05)


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(side: Side, host: str = "127.0.0.2") -> socket.socket:
    """Connect from another address than pullers do."""
    return socket.create_connection(("127.0.0.1", side.port), DEADLINE_S, source_address=(host, 0))


def ask(side: Side, lease: bytes, host: str = "127.0.0.2") -> socket.socket:
    connection = connect(side, host)
    connection.sendall(PullRequest(LAYOUT, lease, 0, 1).to_bytes())
    return connection


async def first_frame(connection: socket.socket) -> FrameKind:
    def receive() -> bytes:
        return connection.recv(HEAD_BYTES, socket.MSG_WAITALL)

    return FrameHead.from_bytes(await asyncio.to_thread(receive)).kind


async def until_closed(connection: socket.socket) -> None:
    def read_on() -> None:
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionError:
            pass

    await asyncio.to_thread(read_on)


async def pull_works(source: Side, target: Side) -> None:
    target.pull(f"127.0.0.1:{source.port}", 0, 4)
    assert (await target.ended(4)).failure == ""
    check_arrived(source, target, 0, 4)


async def test_idle_connections_keep_no_puller_out(connections: ExitStack) -> None:
    async with two_workers() as (source, target, _):
        source.offer(0, 4)
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.1"):
            for _ in range(MAX_ASKING):
                connections.enter_context(connect(source, host))
        await pull_works(source, target)


async def test_idle_connections_that_stay_for_ever_are_closed(
    connections: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "REQUEST_S", 0.05)
    async with two_workers() as (source, _, _):
        for request in (b"", b"half a request"):
            connection = connections.enter_context(connect(source))
            connection.sendall(request)
            await until_closed(connection)


async def test_a_request_that_comes_byte_by_byte_is_late(connections: ExitStack) -> None:
    """Each byte comes in time; the request as a whole does not."""
    async with two_workers() as (source, _, _):
        source.offer(0, 4)
        connection = connections.enter_context(connect(source))
        connection.setblocking(False)
        request = PullRequest(LAYOUT, LEASE, 0, 4).to_bytes()
        num_sent, is_closed = 0, False
        while not is_closed and num_sent < len(request):
            try:
                connection.send(request[num_sent : num_sent + 1])
                num_sent += 1
                is_closed = connection.recv(1) == b""
            except BlockingIOError:
                await asyncio.sleep(0.02)
            except ConnectionError:
                is_closed = True
        assert is_closed, "68 bytes in more than a second are not late"


async def test_unknown_leases_get_few_places(connections: ExitStack) -> None:
    async with two_workers() as (source, _, _):
        asked = [
            connections.enter_context(ask(source, secrets.token_bytes(16), host))
            for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4")
            for _ in range(MAX_UNKNOWN)
        ]
        kinds = [await first_frame(connection) for connection in asked]
        assert kinds.count(FrameKind.WAITING) == MAX_UNKNOWN
        assert kinds.count(FrameKind.BUSY) == len(asked) - MAX_UNKNOWN
        assert kinds[:MAX_UNKNOWN].count(FrameKind.WAITING) == MAX_UNKNOWN_PER_PEER
        assert source.num_pulls == MAX_UNKNOWN


async def test_a_known_lease_has_a_place_beside_unknown_ones(connections: ExitStack) -> None:
    async with two_workers() as (source, target, _):
        source.offer(0, 4)
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.1"):
            for _ in range(MAX_UNKNOWN):
                connection = connections.enter_context(ask(source, secrets.token_bytes(16), host))
                await first_frame(connection)
        await pull_works(source, target)


async def test_a_puller_without_a_place_asks_again(connections: ExitStack) -> None:
    """Its lease is not known yet, and others have all places for such leases."""
    async with two_workers() as (source, target, proxy):
        for host in ("127.0.0.2", "127.0.0.3"):
            for _ in range(MAX_UNKNOWN_PER_PEER):
                connection = connections.enter_context(ask(source, secrets.token_bytes(16), host))
                assert await first_frame(connection) is FrameKind.WAITING
        target.pull(proxy.address, 0, 4)
        async with asyncio.timeout(DEADLINE_S):
            while proxy.num_connections < 2:
                await asyncio.sleep(0.01)
        source.offer(0, 4)
        assert (await target.ended(4)).failure == ""
        check_arrived(source, target, 0, 4)


async def test_a_puller_that_is_stopped_asks_no_more(connections: ExitStack) -> None:
    async with two_workers() as (source, target, proxy):
        for host in ("127.0.0.2", "127.0.0.3"):
            for _ in range(MAX_UNKNOWN_PER_PEER):
                connection = connections.enter_context(ask(source, secrets.token_bytes(16), host))
                assert await first_frame(connection) is FrameKind.WAITING
        target.pull(proxy.address, 0, 4)
        async with asyncio.timeout(DEADLINE_S):
            while proxy.num_connections < 1:
                await asyncio.sleep(0.01)
            target.step(stopped=(1,))
            while any(thread.name == "kv-pull-1" for thread in threading.enumerate()):
                await asyncio.sleep(0.01)


async def test_a_lease_that_becomes_known_leaves_its_place_to_others(connections: ExitStack) -> None:
    async with two_workers() as (source, _, _):
        waiting = [
            connections.enter_context(ask(source, LEASE, host))
            for host in ("127.0.0.2", "127.0.0.3")
            for _ in range(MAX_UNKNOWN_PER_PEER)
        ]
        for connection in waiting:
            assert await first_frame(connection) is FrameKind.WAITING
        source.offer(0, 4)
        for connection in waiting:
            await until_closed(connection)
        async with asyncio.timeout(DEADLINE_S):
            while source.num_pulls:
                await asyncio.sleep(0.01)
        other = connections.enter_context(ask(source, secrets.token_bytes(16)))
        assert await first_frame(other) is FrameKind.WAITING
