"""TLS of servers and channels: files are checked as they are read, and read again when they change.

             tls.certificate, tls.key                 tls.ca
server ────────────────────────────────► client  checks it by its CAs
client ────────────────────────────────► server  checks it by tls.client_ca, if that is set (mTLS),
                                                 and its names by tls.client_names

A renewed certificate is what the next connection sees; open ones are not disturbed.
"""

from __future__ import annotations

import functools
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from triptych.config import TlsConfig
from triptych.config.watched_files import WatchedFiles
from triptych.errors import ConfigError, PermissionDenied
from triptych.rpc.certificates import check_certificates, check_key, check_pair, find_first_end, read_pem

log = logging.getLogger(__name__)

PUBLIC_CAS = "public"
"""The `tls.ca` that means the public CAs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A certificate, its key, and the CAs of clients."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    """The same, for an HTTP server."""
    expires_at_unix_s: float
    """End of the certificate."""


class ServerTls:
    """The certificates that a process's servers show and ask for. May be used from any thread."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: One is missing, is not PEM, or does not fit the others; names it.
        """
        self._config = config
        self._client_names = {name.strip().lower() for name in config.client_names.split(",") if name.strip()}
        paths = [Path(text) for text in (config.certificate, config.key, config.client_ca) if text]
        self._identity = WatchedFiles(
            paths, functools.partial(_read_identity, config), what="certificates (tls.certificate, tls.key)"
        )

    @property
    def expires_at_unix_s(self) -> float:
        """The end of the certificate that is shown now."""
        return self._identity.get().expires_at_unix_s

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server, which asks for renewed files at each handshake."""
        shown = self._identity.get()

        def fetch() -> Any:
            nonlocal shown
            identity = self._identity.get()
            if identity is shown:
                return None  # unchanged
            shown = identity
            return _to_grpc(identity)

        return grpc.dynamic_ssl_server_credentials(
            _to_grpc(shown), fetch, require_client_authentication=bool(self._config.client_ca)
        )

    def check_peer(self, context: grpc.aio.ServicerContext) -> None:
        """Check the certificate that the client of a gRPC call has shown.

        Raises:
            PermissionDenied: It has none of the names of `tls.client_names`.
        """
        if self._client_names:
            shown = context.auth_context()
            fields = ("x509_subject_alternative_name", "x509_common_name")
            names = [name.decode(errors="replace") for field in fields for name in shown.get(field, ())]
            self._check_names(names)

    def check_certificate(self, certificate: Mapping[str, Any]) -> None:
        """Check the certificate that a client of an HTTP server has shown.

        Args:
            certificate: As `ssl.SSLSocket.getpeercert` returns it.

        Raises:
            PermissionDenied: As `check_peer`.
        """
        if self._client_names:
            names = [name for _, name in certificate.get("subjectAltName", ())]
            subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
            self._check_names([*names, *(value for key, value in subject if key == "commonName")])

    def _check_names(self, names: Sequence[str]) -> None:
        if not self._client_names.intersection(name.lower() for name in names):
            shown = ", ".join(names[:8]) or "none"
            raise PermissionDenied(
                f"the client's certificate has none of the names that tls.client_names lists, but {shown:.400}"
            )

    def http_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP server, which takes renewed files at each handshake."""
        context = _create_context(self._config)

        def renew(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._identity.get().context

        context.sni_callback = renew
        return context


def create_server_tls(config: TlsConfig) -> ServerTls | None:
    """Return what the config says servers shall show, or None if they serve in plain text.

    Raises:
        ConfigError: Options are missing, or files cannot be used; names them.
    """
    if bool(config.certificate) != bool(config.key):
        missing, given = ("key", "certificate") if config.certificate else ("certificate", "key")
        raise ConfigError(f"tls.{missing}: needed with tls.{given}, which is set")
    if config.client_names and not config.client_ca:
        raise ConfigError("tls.client_ca: needed with tls.client_names, which is set")
    if not config.certificate:
        if config.client_ca:
            raise ConfigError("tls.certificate: needed with tls.client_ca, which is set")
        return None
    return ServerTls(config)


@dataclass(frozen=True, slots=True, eq=False)
class ClientCredentials:
    """The credentials of channels, as the files were when they were read. Compared by identity."""

    channel: grpc.ChannelCredentials
    server_name: str
    """Name that servers' certificates must have. Empty: the host that is dialed."""


class ClientTls:
    """The certificates that a process shows to servers, and those by which it checks them.

    May be used from any thread.
    """

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: One is missing, is not PEM, or does not fit the others; names it.
        """
        paths = [Path(text) for text in (config.ca, config.certificate, config.key) if text]
        read: Callable[[], ClientCredentials] = functools.partial(_read_client, config)
        self._credentials = WatchedFiles(paths, read, what="certificates (tls.ca, tls.certificate, tls.key)")

    def credentials(self) -> ClientCredentials:
        """Return the credentials of the files as they are now: another object whenever they have changed."""
        return self._credentials.get()


def create_client_tls(config: TlsConfig) -> ClientTls | None:
    """Return what the config says about dialing, or None if it is done in plain text.

    Raises:
        ConfigError: Options are missing, or files cannot be used; names them.
    """
    if config.ca:
        return ClientTls(config)
    if config.server_name:
        raise ConfigError("tls.ca: needed with tls.server_name, which is set")
    return None


def _to_grpc(identity: _Identity) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.client_ca
    )


def _read_identity(config: TlsConfig) -> _Identity:
    certificate, key = _read_pair(config)
    client_ca = _read_cas("tls.client_ca", config.client_ca) if config.client_ca else None
    expires_at = find_first_end(certificate).timestamp()
    return _Identity(certificate, key, client_ca, _create_context(config), expires_at)


def _read_client(config: TlsConfig) -> ClientCredentials:
    cas = None if config.ca == PUBLIC_CAS else _read_cas("tls.ca", config.ca)
    certificate, key = _read_pair(config) if config.certificate and config.key else (None, None)
    return ClientCredentials(grpc.ssl_channel_credentials(cas, key, certificate), config.server_name)


def _read_pair(config: TlsConfig) -> tuple[bytes, bytes]:
    certificate = read_pem("tls.certificate", config.certificate)
    check_certificates("tls.certificate", config.certificate, certificate, now_unix_s=time.time())
    key = read_pem("tls.key", config.key)
    check_key("tls.key", config.key, key)
    check_pair(config.certificate, config.key)
    return certificate, key


def _read_cas(option: str, path: str) -> bytes:
    cas = read_pem(option, path)
    check_certificates(option, path, cas, now_unix_s=time.time())
    return cas


def _create_context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(config.certificate, config.key)
    context.set_alpn_protocols(["http/1.1"])
    if config.client_ca:
        context.load_verify_locations(config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A client that resumes a session shows no certificate, and would outlast a change of the CAs.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context
