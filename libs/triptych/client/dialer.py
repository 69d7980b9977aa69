"""Reaches one server for the typed clients: channels, credentials of each call, and errors as they were meant."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_status import rpc_status

from triptych.config import TlsConfig
from triptych.config.loader import section_from_env
from triptych.errors import ConfigError, EngineUnavailable, GenerationLost, TriptychError
from triptych.rpc.channel import credentials_of, open_channel, with_api_key
from triptych.rpc.status import from_rpc_error, is_broken_write
from triptych.rpc.tls import create_client_tls

_T = TypeVar("_T")
_Stub = TypeVar("_Stub")
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
"""Statuses of calls that ended without a word of the server. UNKNOWN, which servers of ours never send, is what gRPC
makes of a stream that a proxy ends in the middle, because the server behind it has gone. CANCELLED is how a server of
grpc.aio that stops ends calls that have reached it and that it will not begin."""


class Dialer:
    """Channels to a server, or to one of several that serve the same. Owned by a client; for use on one event loop."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            address: host:port of a gRPC server; several, comma-separated: the first that answers is used.
            api_key: The key that each call sends. None: $TRIPTYCH_API_KEY, if it is set.
            tls: How to dial: in plain text where `ca` is empty. None: as $TRIPTYCH_TLS_CA and the like say.
            metadata: Sent with each call, for gateways on the way. Keys are lower case.

        Raises:
            ConfigError: The address, files of `tls` or metadata cannot be used; names them.
        """
        self.addresses = tuple(part.strip() for part in address.split(","))
        """Those that serve the same."""
        for each in self.addresses:
            check_address(each)
        self._place = 0
        self._tls = create_client_tls(TlsConfig(**section_from_env("tls")) if tls is None else tls)
        self._api_key = api_key
        self._metadata = _checked(metadata or {})
        self._channels: dict[str, grpc.aio.Channel] = {}
        """Address -> the channel in use."""
        self._earlier: list[grpc.aio.Channel] = []
        """These carry calls that began before certificates were renewed."""
        self._stubs: dict[Any, Any] = {}
        """Address and class of stubs -> its object on the channel in use."""
        self._credentials = credentials_of(self._tls)

    @property
    def address(self) -> str:
        """The address in use."""
        return self.addresses[self._place]

    def turn_from(self, address: str) -> None:
        """Use the next address, if this one is in use."""
        if self.address == address:
            self._place = (self._place + 1) % len(self.addresses)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel in use."""
        if self.address not in self._channels:
            self._channels[self.address] = open_channel(self.address, credentials=self._credentials)
        return self._channels[self.address]

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """Return a stub of this class, with the newest certificates."""
        if (credentials := credentials_of(self._tls)) is not self._credentials:
            self._credentials = credentials
            self._earlier += self._channels.values()
            self._channels.clear()
            self._stubs.clear()
        key = self.address, kind
        if key not in self._stubs:
            self._stubs[key] = with_api_key(kind(self.channel), self._api_key, self._metadata)
        stub: _Stub = self._stubs[key]
        return stub

    async def answer(self, call: Awaitable[_T]) -> _T:
        """Return the answer to a call that has one; raises its error typed."""
        try:
            return await call
        except grpc.RpcError as error:
            raise self.to_typed_error(error, has_output=False) from None

    def to_typed_error(self, error: grpc.RpcError, has_output: bool, address: str = "") -> TriptychError:
        """Return the error that the server meant, or what became of the connection.

        Args:
            address: The server's. Empty: the one in use.
        """
        address = address or self.address
        if _is_from_server(error):
            return from_rpc_error(error)
        if is_broken_write(error):
            kind = GenerationLost if has_output else EngineUnavailable
            return kind(f"{address} ended the call for a reason that was lost")
        if error.code() in _BROKEN:
            if has_output:
                return GenerationLost(f"the connection to {address} broke in mid-answer: {reason_of(error)}")
            if error.code() is grpc.StatusCode.CANCELLED:
                return EngineUnavailable(f"{address} stopped before it read the request; try again")
            return EngineUnavailable(f"no server answers at {address}: {reason_of(error)}")
        return from_rpc_error(error)

    @staticmethod
    def is_broken(error: grpc.RpcError) -> bool:
        """Return whether the connection ended a call, or the server did without a word."""
        return not _is_from_server(error) and (is_broken_write(error) or error.code() in _BROKEN)

    async def close(self) -> None:
        """End what still runs and hang up."""
        for channel in (*self._earlier, *self._channels.values()):
            await channel.close(grace=None)


def _is_from_server(error: grpc.RpcError) -> bool:
    return rpc_status.from_call(cast(Any, error)) is not None


def check_address(address: str) -> None:
    """Raise ConfigError if it cannot be the address of a gRPC server."""
    if ":" not in address or address.startswith(("http:", "https:")):
        raise ConfigError(f"address: {address!r:.200} is not host:port of a gRPC server, as 127.0.0.1:50051")


def reason_of(error: grpc.RpcError) -> str:
    """Return the last part of gRPC's message about a failed connection, which names the cause: `Connection refused`."""
    cause = (error.details() or error.code().name).rpartition(": ")[2]
    return re.sub(r" \(\d+\)$", "", cause)  # the number of the error, where gRPC's event engine is off


def _checked(metadata: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for key, value in metadata.items():
        is_good = isinstance(key, str) and isinstance(value, str) and key.isascii() and value.isascii()
        if not is_good or key != key.lower() or not key or not (value.isprintable() or not value):
            raise ConfigError(f"metadata: {key!r:.80} is not a lower case key with a text of printable ASCII")
    return tuple(metadata.items())
