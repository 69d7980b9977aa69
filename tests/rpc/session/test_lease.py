"""Which stream has a session, and how long the session outlives it."""

from __future__ import annotations

import asyncio

from triptych.rpc.session.lease import SessionLease


async def test_only_the_latest_stream_counts() -> None:
    lease = SessionLease(keep_s=60.0, on_expired=lambda: None)
    assert [lease.attach(), lease.attach()] == [1, 2]
    assert not lease.detach(1)
    assert lease.stream == 2
    assert lease.detach(2)
    assert (lease.stream, lease.is_waiting) == (0, True)
    assert not lease.detach(2)
    assert lease.attach() == 3
    assert not lease.is_waiting
    lease.end()


async def test_a_session_without_a_stream_expires() -> None:
    expired = asyncio.Event()
    lease = SessionLease(keep_s=0.01, on_expired=expired.set)
    lease.detach(lease.attach())
    async with asyncio.timeout(60):
        await expired.wait()
    assert not lease.is_waiting


async def test_a_session_that_ended_or_was_resumed_does_not_expire() -> None:
    num_expired = 0

    def count() -> None:
        nonlocal num_expired
        num_expired += 1

    leases = [SessionLease(keep_s=0.0, on_expired=count) for _ in range(3)]
    for lease in leases:
        lease.detach(lease.attach())
    leases[0].end()
    leases[1].attach()
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert num_expired == 1
