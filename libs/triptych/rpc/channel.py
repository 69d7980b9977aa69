"""Channels between the tiers: the same limits and keepalive on both ends."""

from __future__ import annotations

import functools
import os
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
    """Return the stub, whose calls send an API key from now on.

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
    )
