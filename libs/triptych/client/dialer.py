"""Reaches one server for the typed clients: channels, credentials of each call, and errors as they were meant."""

from __future__ import annotations

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
from triptych.rpc.tls import ClientCredentials, create_client_tls

_T = TypeVar("_T")
_Stub = TypeVar("_Stub")


class Dialer:
    """Channels to one address. Owned by a client; for use on the event loop that it is created on."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            address: host:port of a gRPC server.
            api_key: The key that each call sends. None: $TRIPTYCH_API_KEY, if it is set.
            tls: How to dial: in plain text where `ca` is empty. None: as $TRIPTYCH_TLS_CA and the like say.
            metadata: Sent with each call, for gateways on the way. Keys are lower case.

        Raises:
            ConfigError: The address, files of `tls` or metadata cannot be used; names them.
        """
        check_address(address)
        self.address = address
        self._tls = create_client_tls(TlsConfig(**section_from_env("tls")) if tls is None else tls)
        self._api_key = api_key
        self._metadata = _checked(metadata or {})
        self._channels: list[grpc.aio.Channel] = []
        """The last is in use. Earlier ones carry calls that began before certificates were renewed."""
        self._stubs: dict[Any, Any] = {}
        """Class of stubs -> its object on the channel in use."""
        self._dial(credentials_of(self._tls))

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel in use."""
        return self._channels[-1]

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """Return a stub of this class, with the newest certificates."""
        if (credentials := credentials_of(self._tls)) is not self._credentials:
            self._dial(credentials)
        if kind not in self._stubs:
            self._stubs[kind] = with_api_key(kind(self.channel), self._api_key, self._metadata)
        stub: _Stub = self._stubs[kind]
        return stub

    async def answer(self, call: Awaitable[_T]) -> _T:
        """Return the answer to a call that has one; raises its error typed."""
        try:
            return await call
        except grpc.RpcError as error:
            raise self.to_typed_error(error, has_output=False) from None

    def to_typed_error(self, error: grpc.RpcError, has_output: bool) -> TriptychError:
        """Return the error that the server meant, or what became of the connection."""
        is_from_server = rpc_status.from_call(cast(Any, error)) is not None
        if is_from_server:
            return from_rpc_error(error)
        if is_broken_write(error):
            kind = GenerationLost if has_output else EngineUnavailable
            return kind(f"{self.address} ended the call for a reason that was lost")
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            if has_output:
                return GenerationLost(
                    f"the connection to {self.address} broke in mid-answer: {reason_of(error)}"
                )
            return EngineUnavailable(f"no server answers at {self.address}: {reason_of(error)}")
        return from_rpc_error(error)

    async def close(self) -> None:
        """End what still runs and hang up."""
        for channel in self._channels:
            await channel.close(grace=None)

    def _dial(self, credentials: ClientCredentials | None) -> None:
        self._credentials = credentials
        self._channels.append(open_channel(self.address, credentials=credentials))
        self._stubs.clear()


def check_address(address: str) -> None:
    """Raise ConfigError if it cannot be the address of a gRPC server."""
    if ":" not in address or address.startswith(("http:", "https:")):
        raise ConfigError(f"address: {address!r:.200} is not host:port of a gRPC server, as 127.0.0.1:50051")


def reason_of(error: grpc.RpcError) -> str:
    """Return the last part of gRPC's message about a failed connection, which names the cause: `Connection refused`."""
    return (error.details() or error.code().name).rpartition(": ")[2]


def _checked(metadata: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for key, value in metadata.items():
        is_good = isinstance(key, str) and isinstance(value, str) and key.isascii() and value.isascii()
        if not is_good or key != key.lower() or not key or not (value.isprintable() or not value):
            raise ConfigError(f"metadata: {key!r:.80} is not a lower case key with a text of printable ASCII")
    return tuple(metadata.items())
