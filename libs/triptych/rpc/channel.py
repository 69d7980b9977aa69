"""Channels between the tiers: the same limits and keepalive on both ends."""

from __future__ import annotations

import functools
import ipaddress
import os
import time
from collections.abc import Sequence
from typing import TypeVar

import grpc
import grpc.aio

from triptych.rpc.interceptors import CLIENT_INTERCEPTORS
from triptych.rpc.tls import ClientCredentials, ClientTls

ADDRESS_ENV = "TRIPTYCH_ADDRESS"
"""The variable that has the gRPC address of the frontend for clients which are given none."""
API_KEY_ENV = "TRIPTYCH_API_KEY"
"""The variable that has the API key of clients which are given none."""
ADMIN_ADDRESS_ENV = "TRIPTYCH_ADMIN_ADDRESS"
"""The variable that has the address of the frontend's admin server."""

PUBLIC_MESSAGE_BYTES = 16 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20

_ATTEMPT_MS = 2_000  # for a connection to be made, before it is tried again
_RESOLVE_MS = 1_000  # between two look-ups of a name
KEEPALIVE_TIME_S = 10
KEEPALIVE_TIMEOUT_S = 5
# gRPC's defaults kill a stream that is silent through a long prefill; both ends ping every 10 s, give up
# after 5 s, and permit a ping every 5 s.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_Stub = TypeVar("_Stub")


def open_channel(
    address: str, *, limit_bytes: int = PUBLIC_MESSAGE_BYTES, credentials: ClientCredentials | None = None
) -> grpc.aio.Channel:
    """Return a channel to host:port for an event loop. It connects lazily; callers set deadlines and dial again.

    Each channel has its own connection (no sharing of subchannels), so that closing one never disturbs
    another, and redials within a second.

    Args:
        credentials: How the server is checked, and what it is shown. None: plain text.
    """
    options = _channel_options(limit_bytes, credentials)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=CLIENT_INTERCEPTORS)
    return grpc.aio.secure_channel(
        address, credentials.channel, options=options, interceptors=CLIENT_INTERCEPTORS
    )


class RenewedChannel:
    """A channel between the tiers for a client that dials again and again. The client owns it.

    A channel keeps its credentials and the addresses that it has found. So another one is opened at a redial once
    certificates were renewed, or where the host is a name, which may have other addresses by now.
    """

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """
        Args:
            address: host:port.
            tls: None: plain text.
        """
        self._address = address
        self._tls = tls
        self._is_name = not _is_ip_address(address)
        self._credentials = credentials_of(tls)
        self.channel = self._open()
        self._opened_at = time.monotonic()

    async def renew(self) -> None:
        """Make `channel` one that connects to where the server may be now. Calls on the one before end."""
        credentials, now = credentials_of(self._tls), time.monotonic()
        may_have_moved = self._is_name and (now - self._opened_at) * 1000 >= _RESOLVE_MS
        if credentials is not self._credentials or may_have_moved:
            self._credentials, old = credentials, self.channel
            self.channel, self._opened_at = self._open(), now
            await old.close(None)

    def _open(self) -> grpc.aio.Channel:
        return open_channel(self._address, limit_bytes=INTERNAL_MESSAGE_BYTES, credentials=self._credentials)


def open_blocking_channel(address: str, credentials: ClientCredentials | None = None) -> grpc.Channel:
    """Return a channel as `open_channel` does, for a thread without an event loop."""
    options = _channel_options(PUBLIC_MESSAGE_BYTES, credentials)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials.channel, options=options)


def credentials_of(tls: ClientTls | None) -> ClientCredentials | None:
    """Return the credentials for a new channel, None for plain text."""
    return None if tls is None else tls.credentials()


def with_api_key(stub: _Stub, api_key: str | None, metadata: Sequence[tuple[str, str]] = ()) -> _Stub:
    """Return the stub; its calls send an API key from now on.

    Args:
        api_key: None: the one in the environment. Empty: none is sent.
        metadata: Sent with each call besides it.
    """
    api_key = os.environ.get(API_KEY_ENV, "") if api_key is None else api_key
    metadata = (*metadata, *((("authorization", f"Bearer {api_key}"),) if api_key else ()))
    if metadata:
        for name, call in vars(stub).items():
            setattr(stub, name, functools.partial(call, metadata=metadata))
    return stub


def _is_ip_address(address: str) -> bool:
    """Return whether the host in host:port is an address and not a name."""
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def message_limits(limit_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return the options that bound one message in both directions."""
    return (("grpc.max_receive_message_length", limit_bytes), ("grpc.max_send_message_length", limit_bytes))


def _channel_options(
    limit_bytes: int, credentials: ClientCredentials | None
) -> tuple[tuple[str, int | str], ...]:
    server_name = "" if credentials is None else credentials.server_name
    return (
        *((("grpc.ssl_target_name_override", server_name),) if server_name else ()),
        *message_limits(limit_bytes),
        *KEEPALIVE,
        # gRPC would send even loopback traffic through $http_proxy, but an address of ours is meant literally.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # This bounds an attempt: a handshake takes some round trips, and a busy machine some time to answer.
        ("grpc.min_reconnect_backoff_ms", _ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # By default a name is looked up once in 30 s at most: for so long a server that is back at another address
        # would not be found.
        ("grpc.dns_min_time_between_resolutions_ms", _RESOLVE_MS),
    )
