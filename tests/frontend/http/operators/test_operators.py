"""Operators' calls over HTTP, as vLLM's users and RL trainers send them, down to the engines' AdminService."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import FrontendCore, answer, frontend_core, raw_request
from tests.helpers.http_api import TRUSTS_NOBODY
from triptych.admin.v1 import admin_pb2
from triptych.config.api_keys import entry_line
from triptych.types.outputs import FinishReason
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.http.operators.app import create_operators_app
from triptych_services.frontend.http.server import HttpServer

DEADLINE_S = 60.0


@asynccontextmanager
async def operators_http(core: FrontendCore, keys: ApiKeys | None = None) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(create_operators_app(core.router, core.generator, keys), "127.0.0.1", 0)
    port = await server.start()
    try:
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, verify=TRUSTS_NOBODY
        )
        async with client as http:
            yield http
    finally:
        await server.stop(0)


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    async with FakeEngine(engine_id="one") as one, FakeEngine(engine_id="two") as two:
        yield [one, two]


async def test_all_engines_sleep_and_wake(engines: list[FakeEngine]) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        response = await http.post("/sleep", params={"level": 2, "mode": "wait"})
        assert (response.status_code, response.json()) == (200, {"released_bytes": 200})
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.post("/wake_up", params={"engine_id": "one"})).status_code == 200
        states = [
            (await http.get("/is_sleeping", params={"engine_id": name})).json() for name in ("one", "two")
        ]
        assert states == [{"is_sleeping": False}, {"is_sleeping": True}]
        assert (await http.post("/wake_up")).status_code == 200
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
    sleep = admin_pb2.SleepRequest(level=2, mode=admin_pb2.PAUSE_MODE_WAIT)
    assert [engine.admin.calls[0] for engine in engines] == [sleep, sleep]


@pytest.mark.parametrize(
    ("query", "mode", "forgets"),
    [
        ({}, admin_pb2.PAUSE_MODE_ABORT, True),
        ({"mode": "wait"}, admin_pb2.PAUSE_MODE_WAIT, True),
        ({"mode": "keep"}, admin_pb2.PAUSE_MODE_KEEP, False),
        ({"mode": "abort", "clear_cache": "false"}, admin_pb2.PAUSE_MODE_ABORT, False),
    ],
    ids=str,
)
async def test_a_pause_forgets_prefixes_unless_told_not_to(
    engines: list[FakeEngine], query: dict[str, str], mode: int, forgets: bool
) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        assert (await http.post("/pause", params=query)).json() == {"status": "paused"}
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.post("/resume")).json() == {"status": "resumed"}
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
    for engine in engines:
        pause, *rest = engine.admin.calls
        assert pause == admin_pb2.PauseRequest(mode=mode)
        assert rest == [admin_pb2.ResetPrefixCacheRequest()] * forgets + [admin_pb2.ResumeRequest()]


async def test_prefixes_are_forgotten_and_counted(engines: list[FakeEngine]) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        assert (await http.post("/reset_prefix_cache")).json() == {"num_blocks": 10}
        assert (await http.post("/reset_prefix_cache?engine_id=two")).json() == {"num_blocks": 5}


async def test_the_server_tells_of_each_engine(engines: list[FakeEngine]) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        info = (await http.get("/server_info")).json()
        assert [(engine["engine_id"], engine["ready"]) for engine in info["engines"]] == [
            ("one", True),
            ("two", True),
        ]
        assert [engine["status"]["num_running"] for engine in info["engines"]] == [3, 3]
        await engines[1].die()
        info = (await http.get("/server_info")).json()
        assert [engine["status"] is None for engine in info["engines"]] == [False, True]
        assert (await http.post("/pause")).status_code == 503
        assert [type(call).__name__ for call in engines[0].admin.calls] == ["PauseRequest"]


async def test_an_operator_aborts_requests_of_any_tenant() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, operators_http(core) as http:
        asking = asyncio.create_task(answer(core.generator, raw_request(request_id="r", tenant="acme")))
        await engine.next_submit()
        response = await http.post("/abort_requests", json={"request_ids": ["r", "other"]})
        assert response.json() == {"aborted_request_ids": ["r"]}
        assert (await asking).deltas[-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=never", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/resume?engine_id=three", "engine_id"),
        ("/wake_up?tags=weights", "tags"),
    ],
)
async def test_bad_arguments_reach_no_engine(engines: list[FakeEngine], path: str, param: str) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        response = await http.post(path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert [engine.admin.calls for engine in engines] == [[], []]


async def test_only_administrators_pass_and_each_call_has_its_line(
    engines: list[FakeEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("ops", "key-ops", admin=True) + "\n" + entry_line("acme", "key-acme") + "\n")
    caplog.set_level(logging.INFO, "triptych_services.frontend.access.audit")
    async with frontend_core(*engines) as core, operators_http(core, ApiKeys(file)) as http:
        statuses = [
            (await http.post("/sleep?level=2", headers={"Authorization": f"Bearer {key}"})).status_code
            for key in ("wrong", "key-acme", "key-ops")
        ]
    assert statuses == [401, 403, 200]
    assert len(engines[0].admin.calls) == 1
    lines = [record.fields for record in caplog.records if record.message == "admin call"]  # type: ignore[attr-defined]
    assert [(line["key"], line["outcome"]) for line in lines] == [
        ("-", "401"),
        ("acme", "403"),
        ("ops", "200"),
    ]
    assert {(line["method"], line["request"]) for line in lines} == {("/sleep", "level=2")}


async def test_pages_of_other_sites_are_refused(engines: list[FakeEngine]) -> None:
    async with frontend_core(*engines) as core, operators_http(core) as http:
        assert (await http.post("/sleep", headers={"Origin": "https://evil.example"})).status_code == 403
        assert (await http.post("/sleep", headers={"Origin": "null"})).status_code == 403
        own = str(http.base_url).rstrip("/")
        assert (await http.post("/resume", headers={"Origin": own})).status_code == 200
    assert [type(call).__name__ for call in engines[0].admin.calls] == ["ResumeRequest"]
