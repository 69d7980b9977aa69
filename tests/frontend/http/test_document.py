"""/openapi.json says what the routes do, and /docs shows it without the network."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.helpers.http_api import HttpApi, open_api, schema_of_answer
from triptych_services.frontend.http import app
from triptych_services.frontend.http.openai.schema import ChatCompletionRequest, CompletionRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 9,
}
CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("get", "/v1/streams/{token}", None),
    ("post", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "n": 2, "stop": "time"}),
    ("post", "/v1/completions", {"prompt": [1], "max_tokens": 1}),
    ("post", "/v1/completions", {"prompt": "a" * 100}),
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", {**CHAT, "model": "other"}),
    (
        "post",
        "/v1/chat/completions",
        {**CHAT, "tools": [], "response_format": {"type": "text"}, "stop": ["a"]},
    ),
    (
        "post",
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "top_logprobs": 2},
    ),
    ("post", "/v1/messages", MESSAGE),
    ("post", "/v1/messages", MESSAGE | {"max_tokens": 100}),
    ("post", "/v1/messages/count_tokens", {"messages": MESSAGE["messages"]}),
    ("post", "/v1/responses", {"input": "hi", "max_output_tokens": 1, "text": {"format": {"type": "text"}}}),
    ("get", "/v1/models", None),
    ("get", "/ping", None),
    ("get", "/v1/models/{model}", None),
    ("post", "/v1/embeddings", {"input": ["a", "b"], "dimensions": 2}),
    ("post", "/v1/embeddings", {"input": [1], "encoding_format": "base64"}),
    ("post", "/pooling", {"input": "ab", "task": "token_embed"}),
    ("post", "/classify", {"input": "ab"}),
    ("post", "/score", {"queries": "a", "documents": ["b", "c"]}),
    ("post", "/v1/score", {"text_1": "a", "text_2": "b"}),
    ("post", "/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("post", "/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("post", "/v2/rerank", {"query": "a", "documents": ["b"]}),
    ("post", "/tokenize", {"prompt": "a"}),
    ("post", "/detokenize", {"tokens": [97]}),
    ("get", "/health", None),
    ("get", "/version", None),
    ("get", "/load", None),
    ("get", "/tokenizer_info", None),
    ("post", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("post", "/abort_requests", {"request_ids": ["a"]}),
]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    shared_api.generator.reset()
    return shared_api


async def openapi(api: HttpApi) -> dict[str, Any]:
    document: dict[str, Any] = (await api.http.get("/openapi.json")).json()
    return document


def check(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    """By jsonschema, which knows nothing of pydantic."""
    root = schema | {"components": document["components"]}
    jsonschema.Draft202012Validator(root).validate(value)


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_requests_and_answers_are_as_described(
    api: HttpApi, method: str, path: str, body: dict[str, Any] | None
) -> None:
    document = await openapi(api)
    operation = document["paths"][path][method]
    if body is not None:
        check(body, operation["requestBody"]["content"]["application/json"]["schema"], document)
    response = await api.http.request(method, path.replace("{model}", "tiny/fake"), json=body)
    check(
        response.json(),
        operation["responses"][str(response.status_code)]["content"]["application/json"]["schema"],
        document,
    )


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": {}}),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": None}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": "a", "typo": 1}),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}),
    ("/v1/completions", {"prompt": "a", "temperature": 2.5}),
    ("/v1/completions", {"prompt": "a", "top_p": 0}),
    ("/v1/completions", {"prompt": "a", "n": 0}),
    ("/v1/completions", {"prompt": "a", "seed": -(1 << 63) - 1}),
    ("/v1/completions", {"prompt": "a", "truncation_side": "middle"}),
    ("/v1/completions", {"prompt": "a", "guided_regex": "a"}),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}),
    ("/v1/completions", {"prompt": "a", "stop": ""}),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 33}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"1": "x"}}),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}),
    ("/v1/completions", {"prompt": "a", "priority": 1 << 31}),
    ("/v1/completions", {"prompt": "a", "user": "x" * 257}),
    ("/v1/completions", {"prompt": "a", "best_of": 0}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {**CHAT, "tools": [{}]}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "yaml"}}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {}}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": []}}),
    ("/v1/responses", {}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": [{"role": "user"}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}),
    ("/v1/responses", {"input": "hi", "tool_choice": {"type": "mcp"}}),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "xml"}}}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "x"}),
    ("/v1/responses", {"input": "hi", "background": True}),
    ("/v1/responses", {"input": "hi", "n": 2}),
    ("/v1/messages", {"max_tokens": 9}),
    ("/v1/messages", {"messages": MESSAGE["messages"]}),
    ("/v1/messages", MESSAGE | {"messages": []}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "a"}]}),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "some"}}),
    ("/v1/messages", MESSAGE | {"stop_sequences": [""]}),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "some"}}),
    ("/v1/messages", MESSAGE | {"mcp_servers": [{}]}),
    ("/v1/messages/count_tokens", {}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
    ("/detokenize", {}),
    ("/abort_requests", {}),
    ("/abort_requests", {"request_ids": []}),
    ("/abort_requests", {"request_ids": [1]}),
]


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_what_is_refused_is_described_as_bad(api: HttpApi, path: str, body: dict[str, Any]) -> None:
    document = await openapi(api)
    operation = document["paths"][path]["post"]
    with pytest.raises(jsonschema.ValidationError):
        check(body, operation["requestBody"]["content"]["application/json"]["schema"], document)
    assert (await api.http.post(path, json=body)).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a", "logprobs": 1}), ("/v1/chat/completions", CHAT)]
)
async def test_events_of_a_stream_are_as_described(api: HttpApi, path: str, body: dict[str, Any]) -> None:
    document = await openapi(api)
    schema = schema_of_answer(document, path, is_streamed=True)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await api.http.post(path, json=streamed)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        check(json.loads(event), schema, document)


async def test_every_route_is_described_with_its_errors_and_header(api: HttpApi) -> None:
    document = await openapi(api)
    assert set(document["paths"]) == {path for _, path, _ in CALLS} | {"/metrics"}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert {"200", "500"} <= set(operation["responses"])
            assert operation["description"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        (header,) = document["paths"][path]["post"]["parameters"]
        assert (header["name"], header["in"]) == ("X-Request-Timeout-S", "header")


@pytest.mark.parametrize("body", [CompletionRequest, ChatCompletionRequest])
async def test_every_field_says_what_it_means(body: type[CompletionRequest | ChatCompletionRequest]) -> None:
    assert [name for name, field in body.model_fields.items() if not field.description] == []


async def test_the_page_for_people_works_without_the_network(api: HttpApi) -> None:
    response = await api.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "/openapi.json" in response.text
    targets = re.findall(r'(?:src|href)="([^"]*)"', response.text)
    assert any(target.endswith("swagger-ui-bundle.js") for target in targets)
    for target in targets:
        assert target.startswith("/")  # here, not on another host
        assert (await api.http.get(target)).status_code == 200


async def test_a_monitor_may_ask_by_head(api: HttpApi) -> None:
    response = await api.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len((await api.http.get("/health")).content)
    assert (await api.http.head("/v1/completions")).status_code == 405


async def test_metrics_are_in_prometheus_form(api: HttpApi) -> None:
    response = await api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE python_info gauge" in response.text


async def test_the_document_is_written_once_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Document(dict[str, Any]):
        def items(self) -> Any:  # as it is written
            threads.append(threading.current_thread())
            return super().items()

    def build(*_: Any, **__: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return Document(openapi="3.1.0")

    monkeypatch.setattr(app, "build_document", build)
    async with open_api() as api:
        answers = await asyncio.gather(*(api.http.get("/openapi.json") for _ in range(3)))
        assert [answer.json() for answer in answers] == [{"openapi": "3.1.0"}] * 3
    assert len(threads) == 2
    assert threading.main_thread() not in threads
