"""Options of TLS; see `fields`."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.option import ALL, ENGINE, FRONTEND, value


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS of gRPC and HTTP ports, and of what a process dials. Files are read again when they change."""

    certificate: str = value(
        "",
        "PEM file with this process's certificate and its chain: it serves with it, and shows it where it dials. "
        "Empty: it serves in plain text.",
        ALL,
        per_rank=True,
    )
    key: str = value(
        "", "PEM file with the certificate's private key, without a passphrase.", ALL, per_rank=True
    )
    client_ca: str = value(
        "",
        "PEM file with the CAs of clients: every client of this process's ports must show a certificate that one of "
        "them has signed (mTLS). Empty: none is asked for.",
        ALL,
        per_rank=True,
    )
    client_names: str = value(
        "",
        "Names of clients that may use this process's ports, comma-separated: the certificate that a client shows must "
        "have one of them, as a subject alternative name or as its common name. Empty: every certificate of "
        "tls.client_ca will do. Health checks need none.",
        ALL,
        per_rank=True,
    )
    ca: str = value(
        "",
        "PEM file with the CAs of the servers that this process dials; `public`: the public ones that gRPC brings. "
        "Empty: it dials in plain text.",
        FRONTEND + ENGINE,
    )
    server_name: str = value(
        "",
        "Name that the certificates of dialed servers must have. Empty: the host that is dialed.",
        FRONTEND + ENGINE,
    )
