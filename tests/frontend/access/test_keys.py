"""API keys on both public APIs and on the admin port: who is let in, for which tenant, and what the log says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.grpc_api import Api, alphabet, ask, error_of
from tests.helpers.grpc_api import open_api as open_grpc
from tests.helpers.http_api import TRUSTS_NOBODY, HttpApi
from tests.helpers.http_api import open_api as open_http
from triptych import errors
from triptych.admin.v1 import admin_pb2
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.config.api_keys import entry_line
from triptych.rpc.channel import with_api_key
from triptych.v1 import generation_pb2, generation_pb2_grpc, model_pb2
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.grpc.interceptors import AuditInterceptor

ACME, ACME_TOO, OTHER, GATEWAY, OPERATOR, URGENT = (
    "key-acme",
    "key-acme-2",
    "key-other",
    "key-gateway",
    "key-operator",
    "key-urgent",
)
LINES = (
    entry_line("acme-1", ACME, tenant="acme"),
    entry_line("acme-2", ACME_TOO, tenant="acme"),
    entry_line("other", OTHER),
    entry_line("gateway", GATEWAY, tenant="*"),
    entry_line("operator", OPERATOR, admin=True),
    entry_line("urgent", URGENT, min_priority=-2),
)
BAD_KEYS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": f"Basic {ACME}"},
    {"authorization": ACME},
    {"x-api-key": "wrong"},
    {"authorization": "Bearer wrong", "x-api-key": ACME},
]


@dataclass(frozen=True)
class Doors:
    """Both APIs of one frontend."""

    grpc: Api
    http: HttpApi
    file: Path
    engine: FakeEngine

    def stub(self, key: str) -> Any:
        return with_api_key(generation_pb2_grpc.GenerationServiceStub(self.grpc.channel), key)

    def openai(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.http.port}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=TRUSTS_NOBODY),
        )


@pytest.fixture
async def doors(tmp_path, monkeypatch) -> AsyncIterator[Doors]:
    monkeypatch.setattr("triptych.config.watched_files.CHECK_INTERVAL_S", 0.0)
    async with open_doors(tmp_path) as doors:
        yield doors


@asynccontextmanager
async def open_doors(folder: Path, reply: Any = alphabet) -> AsyncIterator[Doors]:
    file = folder / "keys.yaml"
    file.write_text("\n".join(LINES) + "\n")
    async with (
        FakeEngine(reply) as engine,
        open_grpc(engine, api_keys_file=str(file)) as api,
        open_http(api.core.generator, keys=ApiKeys(file)) as http,
    ):
        yield Doors(api, http, file, engine)


def request(request_id: str = "", **generation: Any) -> generation_pb2.StreamGenerateRequest:
    return ask(request_id, text="Hi", length={"max_tokens": 3}, **generation)


# No key, or a wrong one


@pytest.mark.parametrize("headers", BAD_KEYS, ids=str)
async def test_a_call_without_a_valid_key_is_refused_alike(doors, headers):
    metadata = tuple(headers.items())
    stub = doors.grpc.generation
    for call in (
        stub.StreamGenerate(request(), metadata=metadata),
        stub.Generate(generation_pb2.GenerateRequest(), metadata=metadata),
        stub.Abort(generation_pb2.AbortRequest(request_ids=["x"]), metadata=metadata),
        doors.grpc.models.ListModels(model_pb2.ListModelsRequest(), metadata=metadata),
    ):
        error = await error_of(call)
        assert type(error) is errors.Unauthenticated
        assert error.message == "no valid API key; send one as `authorization: Bearer KEY`"
    for path in ("/v1/completions", "/v1/models", "/metrics", "/tokenizer_info", "/nowhere"):
        response = await doors.http.http.request(
            "POST" if path == "/v1/completions" else "GET", path, headers=headers
        )
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"] == {
            "message": "no valid API key; send one as `authorization: Bearer KEY`",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    assert not doors.engine.submitted


async def test_a_batch_stream_without_a_key_ends_before_it_has_sent_anything(doors):
    call = doors.grpc.generation.BatchGenerate()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_stays_open(doors):
    stub = health_pb2_grpc.HealthStub(doors.grpc.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service="triptych.v1.GenerationService"))
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert (await doors.http.http.get("/health")).status_code == 200


async def test_the_page_for_people_is_open_and_asks_for_a_key_itself(doors):
    page = await doors.http.http.get("/docs")
    for target in re.findall(r'(?:src|href)="([^"]*)"', page.text):
        assert (await doors.http.http.get(target)).status_code == 200
    document = (await doors.http.http.get("/openapi.json")).json()
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    bearer, header = (document["components"]["securitySchemes"][name] for name in ("bearer", "x-api-key"))
    assert (bearer["type"], bearer["scheme"]) == ("http", "bearer")
    assert (header["type"], header["in"], header["name"]) == ("apiKey", "header", "x-api-key")
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in ("/health", "/ping")
            assert operation.get("security") == ([] if is_open else None)
            assert ("401" in operation["responses"]) is not is_open


# A good key


@pytest.mark.parametrize("headers", [{"authorization": f"bearer {ACME}"}, {"x-api-key": ACME}], ids=str)
async def test_either_header_will_do(doors, headers):
    metadata = tuple(headers.items())
    messages = [m async for m in doors.grpc.generation.StreamGenerate(request(), metadata=metadata)]
    assert messages[-1].HasField("finished")
    assert (await doors.http.http.get("/v1/models", headers=headers)).status_code == 200
    assert [submitted.head.tenant for submitted in doors.engine.submitted] == ["acme"]


async def test_openai_client_with_a_key(doors):
    async with doors.openai(ACME) as client:
        answer = await client.completions.create(model="tiny", prompt="Hi", max_tokens=3, user="someone")
        assert answer.choices[0].text == "abc"
        stream = await client.completions.create(model="tiny", prompt="Hi", max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == "abc"
    assert [submitted.head.tenant for submitted in doors.engine.submitted] == ["acme", "acme"]
    async with doors.openai("wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"


async def test_our_client_with_a_key(doors, monkeypatch):
    async with GenerationClient(doors.grpc.address, api_key=ACME) as client:
        await client.wait_ready(10)
        assert [model.name for model in await client.list_models()] == ["tiny"]
        batch = client.open_batch()
        assert len((await batch.answer("Hi", {"max_tokens": 2}, RequestOptions())).outputs) == 1
        await batch.close()
    async with GenerationClient(doors.grpc.address) as client:
        with pytest.raises(errors.Unauthenticated):
            await client.tokenize("Hi")
    monkeypatch.setenv("TRIPTYCH_API_KEY", OTHER)
    async with GenerationClient(doors.grpc.address) as client:
        assert (await client.tokenize("Hi")).token_ids
    assert [submitted.head.tenant for submitted in doors.engine.submitted] == ["acme"]


# Tenants


async def test_a_key_speaks_for_its_own_tenant_only(doors):
    error = await error_of(doors.stub(ACME).StreamGenerate(request(tenant="other")))
    assert (type(error), error.message) == (
        errors.PermissionDenied,
        "tenant: this API key is of tenant 'acme'; leave the field out",
    )
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "tenant": "other"}
    headers = {"authorization": f"Bearer {ACME}"}
    response = await doors.http.http.post("/v1/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    for key, tenant in ((ACME, "acme"), (OTHER, "other"), (OTHER, ""), (GATEWAY, "anyone"), (GATEWAY, "")):
        async for _ in doors.stub(key).StreamGenerate(request(tenant=tenant)):
            pass
    tenants = [submitted.head.tenant for submitted in doors.engine.submitted]
    assert tenants == ["acme", "other", "other", "anyone", ""]


async def test_items_of_a_batch_have_the_tenant_of_its_key(doors):
    async def items() -> AsyncIterator[Any]:
        yield generation_pb2.BatchGenerateRequest(tag=1, request=request())
        yield generation_pb2.BatchGenerateRequest(tag=2, request=request(tenant="other"))

    failed = {r.tag: r.error.message async for r in doors.stub(ACME).BatchGenerate(items()) if r.error.code}
    assert list(failed) == [2]
    assert [submitted.head.tenant for submitted in doors.engine.submitted] == ["acme"]


async def test_urgent_requests_need_a_key_with_the_right(doors):
    async def items() -> AsyncIterator[Any]:
        yield generation_pb2.BatchGenerateRequest(tag=1, request=request(priority=-1))
        yield generation_pb2.BatchGenerateRequest(tag=2, request=request(priority=3))

    why = "priority: -1 is more urgent than 0, the most urgent that API key 'acme-1' may ask for"
    stub = doors.stub(ACME)
    for call in (
        stub.StreamGenerate(request(priority=-1)),
        stub.Generate(generation_pb2.GenerateRequest(generation=request(priority=-1).generation)),
    ):
        error = await error_of(call)
        assert (type(error), error.message) == (errors.PermissionDenied, why)
    failed = {r.tag: r.error.message async for r in stub.BatchGenerate(items()) if r.error.code}
    assert failed == {1: why}
    for path, prompt in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        body = {"model": "tiny", "max_tokens": 1, "priority": -1, **prompt}
        response = await doors.http.http.post(path, json=body, headers={"authorization": f"Bearer {ACME}"})
        assert (response.status_code, response.json()["error"]["message"]) == (403, why)
    async for _ in doors.stub(GATEWAY).StreamGenerate(request(priority=-7)):
        pass
    async for _ in doors.stub(URGENT).StreamGenerate(request(priority=-2)):
        pass
    assert (
        type(await error_of(doors.stub(URGENT).StreamGenerate(request(priority=-3))))
        is errors.PermissionDenied
    )
    assert [submitted.head.priority for submitted in doors.engine.submitted] == [3, -7, -2]


async def test_tenants_do_not_see_request_ids_of_each_other(tmp_path):
    async with open_doors(tmp_path, None) as doors:
        calls = [doors.stub(key).StreamGenerate(request("same")) for key in (ACME, OTHER)]
        for call in calls:
            await call.read()
        for key in (ACME, ACME_TOO, OTHER):
            assert (
                type(await error_of(doors.stub(key).StreamGenerate(request("same", sampling={"seed": 5}))))
                is errors.DuplicateRequest
            )
        abort = generation_pb2.AbortRequest(request_ids=["same"])
        assert list((await doors.stub(OTHER).Abort(abort)).aborted_request_ids) == ["same"]
        await eventually(lambda: doors.grpc.core.generator.num_active == 1)
        assert not calls[0].done()
        assert list((await doors.stub(OTHER).Abort(abort)).aborted_request_ids) == []
        assert list((await doors.stub(ACME_TOO).Abort(abort)).aborted_request_ids) == ["same"]
        await eventually(lambda: doors.grpc.core.generator.num_active == 0)
        for call in calls:
            call.cancel()


async def test_a_request_is_aborted_by_its_own_tenant_only(tmp_path):
    async with open_doors(tmp_path, None) as doors:
        for key, ends in ((OTHER, False), (ACME_TOO, True), (GATEWAY, True)):
            call = doors.stub(ACME).StreamGenerate(request(f"id-{key}"))
            doors.engine.submitted.clear()
            await call.read()
            aborted = await doors.stub(key).Abort(
                generation_pb2.AbortRequest(request_ids=[f"id-{key}", "no"])
            )
            assert list(aborted.aborted_request_ids) == ([f"id-{key}"] if ends else [])
            call.cancel()
            await eventually(lambda: doors.grpc.core.generator.num_active == 0)


# The file changes while the frontend serves


async def test_keys_come_and_go_without_a_restart(doors):
    new = "key-new"
    assert type(await error_of(doors.stub(new).StreamGenerate(request()))) is errors.Unauthenticated
    doors.file.write_text("\n".join((*LINES[1:], entry_line("new", new))) + "\n")
    async for _ in doors.stub(new).StreamGenerate(request()):
        pass
    assert type(await error_of(doors.stub(ACME).StreamGenerate(request()))) is errors.Unauthenticated
    async with doors.openai(new) as client:
        assert (await client.models.list()).data
    doors.file.write_text("- {broken")
    async for _ in doors.stub(new).StreamGenerate(request()):
        pass


# Operators


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.getMessage() == "admin call"]


async def test_the_admin_port_asks_for_the_key_of_an_administrator(doors, caplog):
    caplog.set_level("INFO")
    call = doors.grpc.admin.Pause
    pause = admin_pb2.PauseRequest(engine_id="x", mode=admin_pb2.PAUSE_MODE_KEEP)
    assert type(await error_of(call(pause))) is errors.Unauthenticated
    acme = (("authorization", f"Bearer {ACME}"),)
    assert type(await error_of(call(pause, metadata=acme))) is errors.PermissionDenied
    operator = (("authorization", f"Bearer {OPERATOR}"),)
    assert type(await error_of(call(pause, metadata=operator))) is not errors.PermissionDenied
    await doors.grpc.admin.ListEngines(admin_pb2.ListEnginesRequest(), metadata=operator)
    lines = await eventually(lambda: lines if len(lines := audited(caplog)) == 4 else None)
    assert [(line["key"], line["method"], line["outcome"]) for line in lines] == [
        ("-", "Pause", "UNAUTHENTICATED"),
        ("acme-1", "Pause", "PERMISSION_DENIED"),
        ("operator", "Pause", lines[2]["outcome"]),
        ("operator", "ListEngines", "OK"),
    ]
    assert lines[2]["request"] == 'engine_id: "x" mode: PAUSE_MODE_KEEP'
    assert lines[2]["outcome"] != "OK"
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)


async def test_a_stream_of_the_admin_port_is_audited_at_its_end(doors, caplog):
    caplog.set_level("INFO")
    operator = (("authorization", f"Bearer {OPERATOR}"),)
    call = doors.grpc.admin.WatchStatus(admin_pb2.WatchStatusRequest(), metadata=operator)
    await call.read()
    assert audited(caplog) == []
    call.cancel()
    (line,) = await eventually(lambda: audited(caplog))
    assert (line["key"], line["method"], line["outcome"]) == ("operator", "WatchStatus", "CANCELLED")


async def test_a_stream_that_is_closed_after_its_call_names_its_peer(caplog) -> None:
    class Context:
        is_gone = False

        def peer(self) -> str:
            assert not self.is_gone, "gRPC's call is freed: it would crash the process"
            return "ipv4:127.0.0.1:9"

    async def watch(request: object, context: object) -> AsyncIterator[int]:
        yield 1

    async def find(details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(watch)

    context, details = Context(), SimpleNamespace(method="/triptych.admin.v1.AdminService/WatchStatus")
    handler = await AuditInterceptor().intercept_service(find, details)
    stream = handler.unary_stream(None, context)
    await anext(stream)
    context.is_gone = True
    caplog.set_level("INFO")
    await stream.aclose()
    (line,) = audited(caplog)
    assert line["peer"] == "ipv4:127.0.0.1:9"
    assert line["outcome"] == "CANCELLED"
