"""LoRA adapters as clients and operators of a frontend see them, with two real engines behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.adapter_stack import AdapterStack, make_adapter, running, until
from tests.helpers.frontend import FrontendCore, answer, frontend_core, raw_request
from tests.helpers.http_api import TRUSTS_NOBODY
from tests.helpers.stack import DEADLINE_S
from triptych.admin.v1 import admin_pb2
from triptych.errors import ModelNotFound, WrongState
from triptych.prefix_hash import root_of_request
from triptych.v1 import model_pb2
from triptych_services.frontend.grpc.admin_forwarder import _OwnCalls
from triptych_services.frontend.grpc.model_servicer import ModelServicer
from triptych_services.frontend.http.app import create_app
from triptych_services.frontend.http.operators.app import create_operators_app
from triptych_services.frontend.http.server import HttpServer
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.streams.migrator import MigrationTerms


@dataclass
class Stand:
    """Two engines and a frontend."""

    one: AdapterStack
    two: AdapterStack
    core: FrontendCore
    public: httpx.AsyncClient
    operators: httpx.AsyncClient

    @property
    def entered(self) -> list[str]:
        """Digests of the rows that both workers have computed."""
        return self.one.runner.entered + self.two.runner.entered

    async def knows(self, *names: str) -> None:
        """Wait until the frontend knows which adapters there are."""
        await until(lambda: sorted(terms.name for terms in self.core.router.adapters.all()) == sorted(names))

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.public.post(
            "/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2, **fields}
        )


class Context:
    """A servicer's context that has time."""

    def time_remaining(self) -> float:
        return DEADLINE_S


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(app, "127.0.0.1", 0)
    port = await server.start()
    try:
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, verify=TRUSTS_NOBODY
        )
        async with client as http:
            yield http
    finally:
        await server.stop(0)


@asynccontextmanager
async def stand(root: Path) -> AsyncIterator[Stand]:
    async with (
        running(root, engine_id="one") as one,
        running(root, engine_id="two") as two,
        frontend_core(one.engine, two.engine, moves=MigrationTerms(), aliases={"other": "naive"}) as core,
        served(create_app(core.generator)) as public,
        served(create_operators_app(core.router, core.generator)) as operators,
    ):
        yield Stand(one, two, core, public, operators)


async def test_adapter_is_served_as_a_model_of_its_own(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with stand(tmp_path) as s:
        body = {"lora_name": "sql", "lora_path": str(tmp_path / "sql")}
        loaded = await s.operators.post("/v1/load_lora_adapter", json=body)
        assert loaded.json() == {"status": "loaded", "lora_name": "sql", "digests": [digest]}
        await s.knows("sql")
        models = {model["id"]: model for model in (await s.public.get("/v1/models")).json()["data"]}
        assert {name: (model["root"], model["parent"]) for name, model in models.items()} == {
            "naive": ("naive", None),
            "other": ("naive", None),
            "sql": ("sql", "naive"),
        }
        assert (await s.public.get("/v1/models/sql")).json() == models["sql"]
        answered = (await s.complete(model="sql")).json()
        assert answered["model"] == "sql"
        assert s.entered == [digest]
        plain = (await s.complete(model="naive")).json()
        assert plain["model"] == "naive"
        assert s.entered.count("") == 1
        again = (await s.complete(model="sql")).json()["system_fingerprint"]
        assert answered["system_fingerprint"] == again != plain["system_fingerprint"]
        assert (await s.complete(model="other")).json()["system_fingerprint"] == plain["system_fingerprint"]
        unloaded = await s.operators.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert unloaded.json() == {"status": "unloaded", "lora_name": "sql"}
        await s.knows()
        refused = await s.complete(model="sql")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_grpc_lists_adapters_and_takes_them_beside_the_model(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with stand(tmp_path) as s:
        admin, context = _OwnCalls(s.core.router, s.core.generator), Context()
        answered = await admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="sql", source="sql"), context)
        assert list(answered.adapter.engine_ids) == ["one", "two"]
        await s.knows("sql")
        listed = await admin.ListAdapters(admin_pb2.ListAdaptersRequest(), context)
        assert [(each.name, each.digest, list(each.engine_ids)) for each in listed.adapters] == [
            ("sql", digest, ["one", "two"])
        ]
        models = await ModelServicer(s.core.generator).ListModels(model_pb2.ListModelsRequest(), context)
        assert [(model.name, model.base_model) for model in models.models] == [
            ("naive", ""),
            ("sql", "naive"),
        ]
        base, adapted = models.models
        assert base.fingerprint == s.one.runner.facts.model.identity.fingerprint != adapted.fingerprint
        for model in ("naive", "other", ""):
            await answer(s.core.generator, raw_request([1, 2, 3], model=model, adapter="sql"))
        assert s.entered == [digest] * 3
        with pytest.raises(ModelNotFound, match="adapter: no engine has the adapter 'more'; loaded: sql"):
            await answer(s.core.generator, raw_request([1, 2, 3], adapter="more"))


async def test_request_goes_to_an_engine_that_has_its_adapter(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with stand(tmp_path) as s:
        await s.two.load("sql")
        await s.knows("sql")
        for _ in range(8):
            assert (await s.complete(model="sql")).status_code == 200
        assert (s.one.runner.entered, s.two.runner.entered) == ([], [digest] * 8)


async def test_request_moves_with_its_adapter(tmp_path: Path) -> None:
    digest = make_adapter(tmp_path, "sql")
    async with stand(tmp_path) as s:
        await s.one.load("sql")
        await s.knows("sql")
        s.one.runner.may_step.clear()
        task = asyncio.create_task(s.complete(model="sql"))
        await until(lambda: s.one.runner.entered)
        await s.two.load("sql")
        await until(lambda: len(s.core.router.alike(s.core.router.find("sql"))) == 2)
        await s.one.engine.kill()
        assert (await task).status_code == 200
        assert s.two.runner.entered == [digest]
        s.one.runner.may_step.set()


async def test_engine_that_fails_to_load_is_named(tmp_path: Path) -> None:
    make_adapter(tmp_path, "sql")
    make_adapter(tmp_path, "more")
    async with stand(tmp_path) as s:
        await s.one.load("sql", "more")
        body = {"lora_name": "sql", "lora_path": "sql"}
        refused = await s.operators.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        assert message.startswith("one: LoadAdapter: 'sql' is loaded from 'more'; unload it first")
        assert message.endswith("carried out by two")
        admin = _OwnCalls(s.core.router, s.core.generator)
        with pytest.raises(WrongState, match=r"^one: .* carried out by two"):
            await admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="sql", source="sql"), Context())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "lora_name: is missing; lora_path: is missing"),
        ({"lora_name": "sql"}, "lora_path: is missing"),
        ({"lora_name": 3, "lora_path": "sql"}, "lora_name: "),
        ({"lora_name": "../sql", "lora_path": "sql"}, "is a path"),
        ({"lora_name": "other", "lora_path": "sql"}, "'other' is an alias of the model 'naive'"),
        ({"lora_name": "naive", "lora_path": "sql"}, "'naive' is the name of a model"),
        ({"lora_name": "sql", "lora_path": "/etc"}, "is not within model.adapter_root"),
        ({"lora_name": "sql", "lora_path": "."}, "lora_path: one: "),
    ],
    ids=str,
)
async def test_bad_body_is_refused_by_name(tmp_path: Path, body: dict[str, Any], words: str) -> None:
    make_adapter(tmp_path, "sql")
    async with stand(tmp_path) as s:
        refused = await s.operators.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
        assert await s.one.list() == await s.two.list() == []


async def test_name_of_an_adapter_never_hides_a_model_or_an_alias(tmp_path: Path) -> None:
    make_adapter(tmp_path, "other")
    async with stand(tmp_path) as s:
        await s.one.load("other")
        await s.two.load("other")
        await until(lambda: all(client.welcome.adapters for client in s.core.router.engines))
        assert s.core.router.find("other").adapter is None
        assert s.core.router.adapters.all() == []


def test_prefix_of_an_adapter_is_looked_up_under_its_root() -> None:
    token_ids = np.arange(8, dtype=np.uint32)
    keys = [RoutedPrompt(token_ids, "", digest).keys(4) for digest in ("", "a" * 64, "b" * 64)]
    assert len({tuple(key) for key in keys}) == 3
    assert root_of_request("", "a" * 64) != root_of_request("a" * 64)
