"""Channels between the tiers: the same limits and keepalive on both ends."""

from __future__ import annotations

import grpc
import grpc.aio

from triptych.rpc.interceptors import CLIENT_INTERCEPTORS

PUBLIC_MESSAGE_BYTES = 16 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20

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


def open_channel(address: str, *, limit_bytes: int = PUBLIC_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Return a channel to host:port for an event loop. It connects lazily; callers set deadlines and dial again.

    Each channel has its own connection (no sharing of subchannels), so that closing one never disturbs
    another, and redials within a second.
    """
    return grpc.aio.insecure_channel(
        address, options=_channel_options(limit_bytes), interceptors=CLIENT_INTERCEPTORS
    )


def open_blocking_channel(address: str) -> grpc.Channel:
    """Return a channel as `open_channel` does, for a thread without an event loop."""
    return grpc.insecure_channel(address, options=_channel_options(PUBLIC_MESSAGE_BYTES))


def message_limits(limit_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return the options that bound one message in both directions."""
    return (("grpc.max_receive_message_length", limit_bytes), ("grpc.max_send_message_length", limit_bytes))


def _channel_options(limit_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        *message_limits(limit_bytes),
        *KEEPALIVE,
        # gRPC would send even loopback traffic through $http_proxy, but an address of ours is meant literally.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
