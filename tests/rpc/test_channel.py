"""Channels that find their server again at another address, or under other certificates."""

from __future__ import annotations

import pytest

from triptych.rpc import channel as channel_module
from triptych.rpc.channel import RenewedChannel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the time in seconds, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(channel_module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("address", ["engine-0.engines:50052", "localhost:50052"])
async def test_a_name_is_looked_up_at_a_redial(clock: list[float], address: str) -> None:
    """A channel looks a name up when it is made, and then as seldom as gRPC likes."""
    renewed = RenewedChannel(address)
    first = renewed.channel
    await renewed.renew()
    assert renewed.channel is first, "it was opened a moment ago"
    clock[0] += 1.0
    await renewed.renew()
    assert renewed.channel is not first
    await renewed.channel.close()


@pytest.mark.parametrize("address", ["10.0.0.7:50052", "[fd00::7]:50052"])
async def test_an_address_keeps_its_channel(clock: list[float], address: str) -> None:
    renewed = RenewedChannel(address)
    first = renewed.channel
    clock[0] += 3600.0
    await renewed.renew()
    assert renewed.channel is first
    await first.close()


def test_channels_look_names_up_every_second() -> None:
    """By default gRPC asks once in 30 s: for so long a server that has moved is not found."""
    options = dict(channel_module._channel_options(1, None))
    assert options["grpc.dns_min_time_between_resolutions_ms"] == 1000
