"""The routes beside completions: aborting, the tokenizer, load, names of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.byte_tokenizer import BOS, EOS, byte_backend, byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import HttpApi, open_api
from triptych.config.api_keys import entry_line
from triptych.errors import ConfigError
from triptych_services.frontend import text_calls
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.app import _read_aliases
from triptych_services.frontend.requests import text_model

A = byte_tokenizer().encode("a")


async def answer_of(api: HttpApi, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await api.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 5, **body}, headers=headers
    )


async def abort(api: HttpApi, *names: str, **headers: str) -> list[str]:
    response = await api.http.post("/abort_requests", json={"request_ids": names}, headers=headers)
    assert response.status_code == 200
    aborted: list[str] = response.json()["aborted_request_ids"]
    return aborted


@pytest.mark.parametrize("name", ["trace", "mine", "cmpl-trace"])
async def test_an_aborted_request_ends_with_what_it_has(name: str) -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as api:
        asking = asyncio.create_task(answer_of(api, {"request_id": "mine"}, **{"X-Request-Id": "trace"}))
        engine.emit(await engine.next_submit(), A)
        assert await abort(api, "another") == []
        assert core.generator.num_active == 1
        assert (await api.http.get("/load")).json() == {"server_load": 1}
        assert await abort(api, name, "another", name) == [name]
        (choice,) = (await asking).json()["choices"]
        await eventually(lambda: engine.num_alive == 0)
        assert await abort(api, name) == []
        assert (await api.http.get("/load")).json() == {"server_load": 0}
    # the reasons that typed clients of OpenAI's know
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "abort")


async def test_a_streamed_answer_that_is_aborted_ends_alike() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as api:
        stream = await api.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
        )
        engine.emit(await engine.next_submit(), A)
        first = await anext(aiter(stream))
        assert await abort(api, first.id) == [first.id]
        last = [chunk async for chunk in stream][-1]
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].model_extra == {"stop_reason": "abort"}


async def test_a_name_that_several_requests_share_ends_all_of_them() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as api:
        asking = [
            asyncio.create_task(answer_of(api, {"prompt": ["a", "b"]}, **{"X-Request-Id": "t"})) for _ in "12"
        ]
        await eventually(lambda: engine.num_alive == 4)
        assert await abort(api, "t") == ["t"]
        for response in await asyncio.gather(*asking):
            assert [choice["stop_reason"] for choice in response.json()["choices"]] == ["abort"] * 2


async def test_a_tenant_aborts_only_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(entry_line(name, f"key-{name}", tenant=name) for name in ("acme", "other")))
    acme, other = ({"Authorization": f"Bearer key-{name}"} for name in ("acme", "other"))
    async with (
        FakeEngine() as engine,
        frontend_core(engine) as core,
        open_api(core.generator, keys=ApiKeys(file)) as api,
    ):
        asking = asyncio.create_task(answer_of(api, {}, **acme, **{"X-Request-Id": "t"}))
        await engine.next_submit()
        assert await abort(api, "t", **other) == []
        assert await abort(api, "t", **acme) == ["t"]
        assert (await asking).json()["choices"][0]["stop_reason"] == "abort"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "none are given"),
        ({"request_ids": []}, "none are given"),
        ({"request_ids": "a"}, "list"),
        ({"request_ids": [1]}, "string"),
        ({"request_ids": ["x"] * 4097}, "4096"),
    ],
    ids=str,
)
async def test_bad_lists_of_ids_are_refused(body: dict[str, Any], why: str) -> None:
    async with open_api() as api:
        response = await api.http.post("/abort_requests", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"].partition("[")[0]) == (400, "request_ids")
        assert why in error["message"]


async def test_clients_learn_what_they_need_to_tokenize_alike() -> None:
    async with open_api() as api:
        info = (await api.http.get("/tokenizer_info")).json()
        tokens = (
            await api.http.post("/tokenize", json={"prompt": "Hello the ü", "return_token_strs": True})
        ).json()
        plain = (await api.http.post("/tokenize", json={"prompt": "Hello"})).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == (BOS, EOS, None)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] == byte_tokenizer().chat_template
    assert tokens["token_strs"] == [byte_backend().id_to_token(token_id) for token_id in tokens["tokens"]]
    assert "token_strs" not in plain


async def test_a_text_of_many_contexts_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_model, "ALWAYS_TOKENIZED", 100)
    monkeypatch.setattr(text_calls, "ALWAYS_TOKENIZED", 100)
    num_contexts, longest = text_model.CONTEXTS_TOKENIZED, byte_tokenizer().max_chars_per_token
    async with FakeEngine() as engine, frontend_core(engine) as core, open_api(core.generator) as api:

        async def tokenize(prompt: str) -> httpx.Response:
            return await api.http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False})

        limit = num_contexts * (await tokenize("z")).json()["max_model_len"]
        assert (await tokenize("z" * limit)).json()["count"] == limit
        too_many = await tokenize("z" * (limit + 1))
        too_long = await tokenize("z" * (limit * longest + 1))
    assert (too_many.status_code, too_long.status_code) == (400, 400)
    assert f"{limit + 1} tokens are above the limit {limit}" in too_many.json()["error"]["message"]
    assert f"more tokens than {num_contexts} times that" in too_long.json()["error"]["message"]


async def test_a_conversation_is_tokenized_as_it_is_generated_from() -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ mood }}"
        "{% for message in messages %}{{ message.content }}{% if not loop.last %};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    body = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "chat_template_kwargs": {"mood": "glad "},
        "continue_final_message": True,
    }
    tokenizer = byte_tokenizer(chat_template=template)
    async with (
        FakeEngine(lambda _: A) as engine,
        frontend_core(engine, tokenizer=tokenizer, tool_call_parser="hermes") as core,
        open_api(core.generator) as api,
    ):
        tokens = (await api.http.post("/tokenize", json=body)).json()["tokens"]
        await api.http.post("/v1/chat/completions", json=body | {"max_tokens": 1})
    assert tokens == engine.submitted[0].token_ids.tolist()
    assert tokenizer.decode(tokens) == "look glad a;b"


async def test_a_model_may_have_other_names() -> None:
    aliases = _read_aliases("gpt-4o=tiny, other = nowhere,tiny=nowhere")
    async with (
        FakeEngine(lambda _: A) as engine,
        frontend_core(engine, aliases=aliases) as core,
        open_api(core.generator) as api,
    ):
        listed = (await api.http.get("/v1/models")).json()["data"]
        one = (await api.http.get("/v1/models/gpt-4o")).json()
        answer = (await answer_of(api, {"model": "gpt-4o", "max_tokens": 1})).json()
        assert (await answer_of(api, {"model": "tiny", "max_tokens": 1})).status_code == 200
        unknown = await answer_of(api, {"model": "other"})
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("tiny", "tiny", None),
        ("gpt-4o", "tiny", None),
    ]
    assert one == listed[1]
    assert answer["model"] == "tiny"
    assert unknown.status_code == 404


@pytest.mark.parametrize("text", ["a", "=b", "a=", "a=b,c"])
def test_aliases_name_a_model(text: str) -> None:
    with pytest.raises(ConfigError, match=r"frontend\.model_aliases: .* ALIAS=NAME"):
        _read_aliases(text)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/v1/models", "/load"])
async def test_monitors_may_ask_by_head(path: str) -> None:
    async with open_api() as api:
        response = await api.http.head(path)
        assert (response.status_code, response.content) == (200, b"")
