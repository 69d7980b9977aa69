"""TLS of gRPC: what is checked and shown, certificates that are renewed, and files that cannot be used."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.certificates import Authority
from tests.rpc.conftest import ADMIN, RaisingAdmin
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.cli import main
from triptych.config import TlsConfig
from triptych.errors import ConfigError
from triptych.rpc.certificates import find_end
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES, credentials_of, open_channel
from triptych.rpc.server import RpcServer
from triptych.rpc.tls import create_client_tls, create_server_tls


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files at every use."""
    monkeypatch.setattr("triptych.config.watched_files.CHECK_INTERVAL_S", 0.0)


class _Server:
    """A server whose calls wait while `released` is not set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.released.set()
        self.port = 0

    def open_channel(self, tls: TlsConfig, host: str = "127.0.0.1") -> Any:
        return open_channel(f"{host}:{self.port}", credentials=credentials_of(create_client_tls(tls)))

    async def call(self, tls: TlsConfig, host: str = "127.0.0.1") -> str:
        """Make one call on a new connection; returns what it answers or its status."""
        async with self.open_channel(tls, host) as channel:
            try:
                request = admin_pb2.GetStatusRequest(engine_id="e")
                response = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(request, timeout=30)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
        return response.status.engine_id


@asynccontextmanager
async def serve(config: TlsConfig) -> AsyncIterator[_Server]:
    running = _Server()
    server = RpcServer(services=[ADMIN], limit_bytes=PUBLIC_MESSAGE_BYTES, tls=create_server_tls(config))

    async def behave() -> None:
        await running.released.wait()

    admin_pb2_grpc.add_AdminServiceServicer_to_server(RaisingAdmin(behave), server.grpc)
    running.port = server.bind("127.0.0.1", 0, option="frontend.port")
    await server.start()
    try:
        yield running
    finally:
        await server.stop(0)


def names_shown(port: int, ca: str, protocol: str = "h2") -> list[str]:
    """Return the names in the certificate that a server shows to a new connection."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols([protocol])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as bare,
        context.wrap_socket(bare, server_hostname="127.0.0.1") as wrapped,
    ):
        found = wrapped.getpeercert()
    assert found is not None
    return [name for _, name in found["subjectAltName"]]


# Who is let in


async def test_a_server_is_checked_by_its_ca(authority, tmp_path):
    stranger = Authority(tmp_path)
    async with serve(authority.server()) as server:
        assert await server.call(authority.client()) == "e"
        assert "CERTIFICATE_VERIFY_FAILED" in await server.call(stranger.client())
        assert (await server.call(TlsConfig())).startswith("UNAVAILABLE")


async def test_a_plain_server_is_not_taken_for_one_with_tls(authority):
    async with serve(TlsConfig()) as server:
        assert await server.call(TlsConfig()) == "e"
        assert (await server.call(authority.client())).startswith("UNAVAILABLE")


async def test_a_certificate_of_another_name_needs_to_be_expected(authority):
    certificate, key = authority.issue("named", "engine.example", no_hosts=True)
    async with serve(TlsConfig(certificate=certificate, key=key)) as server:
        assert (await server.call(authority.client())).startswith("UNAVAILABLE")
        assert await server.call(authority.client(server_name="engine.example")) == "e"
        assert (await server.call(authority.client(server_name="other.example"))).startswith("UNAVAILABLE")


async def test_mtls_asks_clients_for_a_certificate(authority, tmp_path):
    clients, strangers = Authority(tmp_path), Authority(tmp_path)
    async with serve(authority.server(client_ca=clients.file)) as server:
        certificate, key = clients.issue("client")
        assert await server.call(replace(authority.client(), certificate=certificate, key=key)) == "e"
        assert (await server.call(authority.client())).startswith("UNAVAILABLE")
        certificate, key = strangers.issue("stranger")
        assert (await server.call(replace(authority.client(), certificate=certificate, key=key))).startswith(
            "UNAVAILABLE"
        )


async def test_a_server_takes_clients_of_certain_names_only(authority):
    names = "frontend, spiffe://cluster/frontend"
    config = replace(authority.server(client_ca=authority.file), client_names=names)
    async with serve(config) as server:
        for owner, *more, outcome in (
            ("one", "frontend", "e"),
            ("two", "FRONTEND", "e"),
            ("three", "other", "frontend", "e"),
            ("four", "enginecore", "PERMISSION_DENIED"),
            ("five", "frontend.example", "PERMISSION_DENIED"),
            ("six", "PERMISSION_DENIED"),
        ):
            certificate, key = authority.issue(owner, *more)
            client = replace(authority.client(), certificate=certificate, key=key)
            assert (await server.call(client)).startswith(outcome), owner
        refusal = await server.call(authority.client("seven"))
        assert "none of the names that tls.client_names lists, but 127.0.0.1, localhost" in refusal
        async with server.open_channel(authority.client("eight")) as channel:
            watch = admin_pb2_grpc.AdminServiceStub(channel).WatchStatus(admin_pb2.WatchStatusRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            stub = health_pb2_grpc.HealthStub(channel)  # probes have certificates of their own
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status


def test_names_of_clients_need_their_ca(authority):
    with pytest.raises(ConfigError, match=r"^tls\.client_ca: needed with tls\.client_names, which is set$"):
        create_server_tls(replace(authority.server(), client_names="frontend"))


async def test_health_is_asked_through_mtls_from_the_command_line(authority, capsys, monkeypatch):
    async with serve(authority.server(client_ca=authority.file)) as server:
        client = authority.client("probe")
        address = f"127.0.0.1:{server.port}"
        words = ["health", address, "--tls-ca", client.ca]
        assert await asyncio.to_thread(main, words) == 1
        pair = ["--tls-certificate", client.certificate, "--tls-key", client.key]
        assert await asyncio.to_thread(main, [*words, *pair]) == 0
        for name in ("ca", "certificate", "key"):
            monkeypatch.setenv(f"TRIPTYCH_TLS_{name.upper()}", getattr(client, name))
        assert await asyncio.to_thread(main, ["health", address]) == 0
    assert capsys.readouterr().out == "SERVING\n" * 2


# Renewed certificates


async def test_a_renewed_certificate_is_shown_to_the_next_connection(authority, caplog):
    async with serve(authority.server("server", "first.example")) as server:
        server.released.clear()  # the stream's second message waits
        async with server.open_channel(authority.client()) as channel:
            stream = admin_pb2_grpc.AdminServiceStub(channel).WatchStatus(admin_pb2.WatchStatusRequest())
            assert (await stream.read()).status.engine_id == "first"
            assert "first.example" in await asyncio.to_thread(names_shown, server.port, authority.file)
            authority.issue("server", "second.example")
            assert "second.example" in await asyncio.to_thread(names_shown, server.port, authority.file)
            server.released.set()
            assert (await stream.read()).status.engine_id == "last"
        (authority.folder / "server.pem").write_text("not PEM")
        assert "second.example" in await asyncio.to_thread(names_shown, server.port, authority.file)
        assert any("is not PEM" in record.getMessage() for record in caplog.records)
        authority.issue("server", "third.example")
        assert "third.example" in await asyncio.to_thread(names_shown, server.port, authority.file)


def test_the_end_of_the_certificate_is_that_of_the_one_shown(authority):
    def end_of_file() -> float:
        pem = (authority.folder / "server.pem").read_bytes()
        return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc.timestamp()

    tls = create_server_tls(authority.server("server", "first.example"))
    assert tls is not None
    first = end_of_file()
    assert tls.expires_at_unix_s == first
    authority.issue("server", "second.example", expired=True)
    assert tls.expires_at_unix_s == end_of_file() != first
    renewed = end_of_file()
    (authority.folder / "server.pem").write_text("not PEM")
    assert tls.expires_at_unix_s == renewed, "the one before is still shown"


async def test_a_renewed_client_ca_counts_for_the_next_connection(authority, tmp_path):
    clients = Authority(tmp_path)
    file = tmp_path / "clients.pem"
    file.write_bytes(clients.ca.cert_pem.bytes())
    async with serve(authority.server(client_ca=str(file))) as server:
        certificate, key = clients.issue("client")
        client = replace(authority.client(), certificate=certificate, key=key)
        assert await server.call(client) == "e"
        file.write_bytes(Authority(tmp_path).ca.cert_pem.bytes())
        assert (await server.call(client)).startswith("UNAVAILABLE")


def test_credentials_of_a_client_change_with_its_files_only(authority):
    tls = create_client_tls(authority.client("client"))
    first = tls.credentials()
    assert tls.credentials() is first
    authority.issue("client")
    assert tls.credentials() is not first


# Files that cannot be used


def server_files(authority: Authority) -> TlsConfig:
    return authority.server(client_ca=authority.file)


def spoil(config: TlsConfig, option: str, content: bytes | None) -> TlsConfig:
    path = Path(getattr(config, option))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    return config


ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
DAMAGED = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("option", "content", "why"),
    [
        ("certificate", None, "No such file or directory"),
        ("certificate", b"\x30\x82", "is not PEM"),
        ("certificate", ENCRYPTED, "has no certificate"),
        ("certificate", DAMAGED, "damaged"),
        ("key", None, "No such file or directory"),
        ("key", DAMAGED, "has no private key"),
        ("key", ENCRYPTED, "without a passphrase"),
        ("client_ca", None, "No such file or directory"),
        ("client_ca", b"", "is not PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(authority, option, content, why):
    config = spoil(server_files(authority), option, content)
    with pytest.raises(ConfigError) as caught:
        create_server_tls(config)
    assert f"tls.{option}: {getattr(config, option)}" in str(caught.value)
    assert why in str(caught.value)


def test_a_key_of_another_certificate_is_refused(authority):
    config = authority.server()
    _, other = authority.issue("other")
    with pytest.raises(ConfigError, match="is not the key of the certificate in"):
        create_server_tls(replace(config, key=other))
    with pytest.raises(ConfigError, match="is not the key of the certificate in"):
        create_client_tls(TlsConfig(ca=authority.file, certificate=config.certificate, key=other))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (TlsConfig(certificate="x"), "tls.key: needed with tls.certificate"),
        (TlsConfig(key="x"), "tls.certificate: needed with tls.key"),
        (TlsConfig(client_ca="x"), "tls.certificate: needed with tls.client_ca"),
    ],
)
def test_options_that_need_each_other(config, why):
    with pytest.raises(ConfigError, match=why):
        create_server_tls(config)


def test_a_server_name_needs_a_ca():
    with pytest.raises(ConfigError, match=r"tls\.ca: needed with tls\.server_name"):
        create_client_tls(TlsConfig(server_name="x"))


def test_an_expired_certificate_is_a_warning(authority, caplog):
    certificate, key = authority.issue("old", expired=True)
    create_server_tls(TlsConfig(certificate=certificate, key=key))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == f"tls.certificate: the certificate in {certificate} expired at 2020-01-01T00:00:00+00:00"


def test_the_end_of_a_certificate_is_what_cryptography_reads(authority):
    for expired in (False, True):
        certificate, _ = authority.issue("any", expired=expired)
        found = x509.load_pem_x509_certificates(Path(certificate).read_bytes())
        for each in found:
            der = ssl.PEM_cert_to_DER_cert(each.public_bytes(Encoding.PEM).decode())
            assert find_end(der) == each.not_valid_after_utc
    ca = x509.load_pem_x509_certificate(Path(authority.file).read_bytes())
    assert find_end(ca.public_bytes(Encoding.DER)) == ca.not_valid_after_utc
