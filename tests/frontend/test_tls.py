"""TLS of the frontend: HTTPS with its renewals, and the dialing of an engine whose CA was replaced."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.certificates import Authority
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import DEADLINE_S, HttpApi, open_api
from tests.rpc.test_tls import names_shown
from triptych.client.grpc_client import GenerationClient
from triptych.config import FrontendConfig, TlsConfig
from triptych.errors import EngineUnavailable
from triptych.rpc.server import RpcServer
from triptych.rpc.tls import create_client_tls, create_server_tls
from triptych_services.frontend.app import create_server
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.status_watch import StatusWatch


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files at every use."""
    monkeypatch.setattr("triptych.config.watched_files.CHECK_INTERVAL_S", 0.0)


def https(api: HttpApi, ca: str, certificate: str = "", key: str = "") -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=ca)
    if certificate:
        context.load_cert_chain(certificate, key)
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{api.port}", verify=context, timeout=DEADLINE_S)


async def test_openai_client_over_https(authority):
    async with (
        open_api(tls=create_server_tls(authority.server())) as api,
        https(api, authority.file) as http,
        openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{api.port}/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        stream = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        assert text == "0" + "".join(WORDS)
        with pytest.raises(httpx.TransportError):
            await api.http.get("/health")  # in plain text
        async with https(api, Authority(authority.folder).file) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/health")


async def test_https_with_mtls_asks_for_a_certificate(authority):
    config = authority.server(client_ca=authority.file)
    async with open_api(tls=create_server_tls(config)) as api:
        async with https(api, authority.file, *authority.issue("client")) as http:
            assert (await http.get("/health")).status_code == 200
        async with https(api, authority.file) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")
        strangers = Authority(authority.folder)
        async with https(api, authority.file, *strangers.issue("stranger")) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")


async def test_https_shows_a_renewed_certificate_and_streams_go_on(authority):
    config = authority.server("server", "first.example", client_ca="")
    async with open_api(tls=create_server_tls(config)) as api, https(api, authority.file) as http:
        api.generator.hold_after_words = 1
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 20, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await asyncio.wait_for(api.generator.holding.wait(), DEADLINE_S)
            assert "first.example" in await asyncio.to_thread(names_of_http, api.port, authority.file)
            authority.issue("server", "second.example")
            assert "second.example" in await asyncio.to_thread(names_of_http, api.port, authority.file)
            api.generator.released.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        async with https(api, authority.file) as another:
            assert (await another.get("/health")).status_code == 200


def names_of_http(port: int, ca: str) -> list[str]:
    return names_shown(port, ca, protocol="http/1.1")


async def test_https_takes_a_renewed_client_ca(authority):
    file = authority.folder / "clients.pem"
    file.write_bytes(authority.ca.cert_pem.bytes())
    client = authority.issue("client")
    async with open_api(tls=create_server_tls(authority.server(client_ca=str(file)))) as api:
        async with https(api, authority.file, *client) as http:
            assert (await http.get("/health")).status_code == 200
        file.write_bytes(Authority(authority.folder).ca.cert_pem.bytes())
        async with https(api, authority.file, *client) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")


async def test_a_redial_takes_certificates_that_were_renewed(authority):
    """An engine and a frontend whose CA is replaced find each other again, without a restart of the frontend."""
    ca_file = authority.folder / "ca.pem"

    def write(of: Authority) -> tuple[TlsConfig, TlsConfig]:
        ca_file.write_bytes(of.ca.cert_pem.bytes())
        server = replace(of.server("engine"), client_ca=str(ca_file))
        certificate, key = of.issue("frontend")
        return server, TlsConfig(ca=str(ca_file), certificate=certificate, key=key)

    server, client = write(authority)
    engine = FakeEngine()
    engine.tls = create_server_tls(server)
    async with engine:
        dialed = EngineClient(engine.address, frontend_id="f", boot_id="b", tls=create_client_tls(client))
        running = asyncio.create_task(dialed.run())
        try:
            await eventually(lambda: dialed.is_ready)
            await engine.die()
            await eventually(lambda: not dialed.is_ready)
            server, _ = write(Authority(authority.folder))
            engine.tls = create_server_tls(server)
            await engine.start()
            await eventually(lambda: dialed.is_ready)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_our_client_takes_renewed_certificates(authority):
    """As above, between a client and the frontend."""
    ca_file = authority.folder / "ca.pem"

    async def start(of: Authority, port: int = 0) -> tuple[RpcServer, int]:
        ca_file.write_bytes(of.ca.cert_pem.bytes())
        tls = create_server_tls(replace(of.server("frontend"), client_ca=str(ca_file)))
        server = create_server(FrontendConfig(), core.generator, StatusWatch(), tls=tls)
        port = server.bind("127.0.0.1", port, option="frontend.port")
        await server.start()
        return server, port

    async with FakeEngine() as engine, frontend_core(engine) as core:
        server, port = await start(authority)
        certificate, key = authority.issue("client")
        tls = TlsConfig(ca=str(ca_file), certificate=certificate, key=key)
        async with GenerationClient(f"127.0.0.1:{port}", tls=tls) as client:
            assert [model.name for model in await client.list_models()] == ["tiny"]
            await server.stop(None)
            other = Authority(authority.folder)
            server, _ = await start(other, port)
            with pytest.raises(EngineUnavailable):
                await client.list_models()  # its own certificate is still one of the old CA
            other.issue("client")
            assert [model.name for model in await client.list_models()] == ["tiny"]
        await server.stop(None)


async def test_an_engine_of_another_ca_is_not_taken(authority):
    engine = FakeEngine()
    engine.tls = create_server_tls(Authority(authority.folder).server())
    async with engine:
        dialed = EngineClient(
            engine.address, frontend_id="f", boot_id="b", tls=create_client_tls(authority.client())
        )
        running = asyncio.create_task(dialed.run())
        try:
            await eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in dialed.why_not_ready)
            assert not engine.hellos
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_https_takes_clients_of_certain_names_only(authority):
    config = replace(authority.server(client_ca=authority.file), client_names="gateway,sidecar")
    async with open_api(tls=create_server_tls(config)) as api:
        for owner, name, status in (
            ("one", "gateway", 200),
            ("two", "sidecar", 200),
            ("three", "other", 403),
        ):
            async with https(api, authority.file, *authority.issue(owner, name)) as http:
                response = await http.get("/health")
                assert response.status_code == status
        assert response.json()["error"]["code"] == "permission_denied"
        assert "none of the names that tls.client_names lists" in response.json()["error"]["message"]
