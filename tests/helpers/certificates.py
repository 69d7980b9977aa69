"""Certificates made on the spot."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import trustme

from triptych.config import TlsConfig

HOST_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Authority:
    """A CA, whose files lie in a folder."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    @property
    def file(self) -> str:
        """The PEM file with the CA itself."""
        path = self.folder / f"ca-{id(self.ca)}.pem"
        self.ca.cert_pem.write_to_path(path)
        return str(path)

    def issue(
        self, owner: str, *names: str, expired: bool = False, no_hosts: bool = False
    ) -> tuple[str, str]:
        """Write a certificate for the loopback host and these names, and its key. Return their files.

        Writing again for the same owner renews them, as a tool of operators would: each file moved into its place.
        """
        not_after = datetime(2020, 1, 1, tzinfo=UTC) if expired else None
        issued = self.ca.issue_cert(
            *(() if no_hosts else HOST_NAMES),
            *names,
            not_after=not_after,
            not_before=datetime(2019, 1, 1, tzinfo=UTC),
        )
        certificate, key = self.folder / f"{owner}.pem", self.folder / f"{owner}.key"
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        for path, content in ((certificate, chain), (key, issued.private_key_pem.bytes())):
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)
        return str(certificate), str(key)

    def server(self, owner: str = "server", *names: str, client_ca: str = "") -> TlsConfig:
        certificate, key = self.issue(owner, *names)
        return TlsConfig(certificate=certificate, key=key, client_ca=client_ca)

    def client(self, owner: str = "", server_name: str = "") -> TlsConfig:
        """A client that checks servers by this CA. `owner`: shows a certificate of this name; empty: shows none."""
        certificate, key = self.issue(owner) if owner else ("", "")
        return TlsConfig(ca=self.file, certificate=certificate, key=key, server_name=server_name)
