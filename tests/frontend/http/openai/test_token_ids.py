"""Token ids and the log-probabilities of prompts over HTTP, in vLLM's shapes, through the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from tests.helpers.fake_generator import MODEL
from tests.helpers.http_api import HttpApi, open_api, schema_of_answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Any = [{"role": "user", "content": "hé"}]
CHAT_IDS = list("user:hé".encode())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    shared_api.generator.reset()
    return shared_api


async def send(api: HttpApi, path: str, **body: Any) -> Any:
    """Return the whole answer, or the chunks of a stream, each as its schema describes it."""
    response = await api.post(path, json.dumps({"model": MODEL, "temperature": 1, **body}))
    assert response.status_code == 200, response.text
    document = (await api.http.get("/openapi.json")).json()
    is_streamed = bool(body.get("stream"))
    values = _events(response.text) if is_streamed else [response.json()]
    for value in values:
        schema = schema_of_answer(document, path, is_streamed=is_streamed)
        jsonschema.Draft202012Validator(schema).validate(value)
    return values if is_streamed else values[0]


def _events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]


async def test_completions_tell_the_tokens_of_each_prompt_and_choice(api: HttpApi) -> None:
    body: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "return_token_ids": True}
    answer = await send(api, "/v1/completions", **body)
    chunks = await send(api, "/v1/completions", stream=True, **body)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == ([97, 98] if choice["index"] < 2 else [99])
        assert choice["token_ids"] == [0, 1, 2]
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part.get("prompt_token_ids") for part in parts] == [choice["prompt_token_ids"], None, None]
        assert [part["token_ids"] for part in parts] == [[0], [1], [2]]


async def test_chats_tell_the_tokens_of_the_rendered_prompt(api: HttpApi) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 2, "n": 2, "return_token_ids": True}
    answer = await send(api, "/v1/chat/completions", **body)
    assert answer["prompt_token_ids"] == CHAT_IDS
    assert [choice["token_ids"] for choice in answer["choices"]] == [[0, 1], [0, 1]]
    openings, others = [], []
    for chunk in await send(api, "/v1/chat/completions", stream=True, **body):
        (openings if "prompt_token_ids" in chunk else others).append(chunk)
    assert [chunk["prompt_token_ids"] for chunk in openings] == [CHAT_IDS] * 2
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in openings)
    assert [chunk["choices"][0]["token_ids"] for chunk in others] == [[0], [0], [1], [1]]


async def test_nobody_gets_token_ids_unasked(api: HttpApi) -> None:
    whole = await send(api, "/v1/completions", prompt="a", logprobs=1, return_token_ids=False)
    chunks = await send(api, "/v1/chat/completions", messages=CHAT, stream=True, logprobs=True)
    assert "token_ids" not in json.dumps([whole, chunks])


async def test_log_probabilities_name_tokens_by_their_ids(api: HttpApi) -> None:
    body: dict[str, Any] = {"return_tokens_as_token_ids": True}
    chat = await api.client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=1, extra_body=body
    )
    assert chat.choices[0].logprobs is not None
    (token,) = chat.choices[0].logprobs.content or ()
    assert (token.token, token.bytes) == ("token_id:0", list(b"0"))
    assert [top.token for top in token.top_logprobs] == ["token_id:101", "token_id:200"]
    answer = await api.client.completions.create(
        model=MODEL, prompt="hé", echo=True, logprobs=1, max_tokens=1, extra_body=body
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [f"token_id:{token_id}" for token_id in [*"hé".encode(), 0]]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {"token_id:195": -1.0, "token_id:65": -0.5}


async def test_prompt_logprobs_have_vllm_s_shape(api: HttpApi) -> None:
    expected = [
        None,
        {
            "195": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        },
        {
            "169": {"logprob": -2.0, "rank": 2, "decoded_token": "\ufffd"},
            "65": {"logprob": -1.5, "rank": 1, "decoded_token": "A"},
        },
    ]
    answer = await send(api, "/v1/completions", prompt=["hé", "x"], n=2, prompt_logprobs=2, max_tokens=0)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2 + [[None]] * 2
    assert [choice["text"] for choice in answer["choices"]] == [""] * 4
    chat = await send(api, "/v1/chat/completions", messages=CHAT, prompt_logprobs=0, max_tokens=1)
    assert [next(iter(each)) for each in chat["prompt_logprobs"][1:]] == list(map(str, CHAT_IDS[1:]))
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_prompt_logprobs_and_echo_may_come_together(api: HttpApi) -> None:
    body: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
    plain = await send(api, "/v1/completions", **body)
    both = await send(api, "/v1/completions", prompt_logprobs=1, **body)
    assert both["choices"][0].pop("prompt_logprobs")[1].keys() == {"98", "65"}
    assert both["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: comes with whole answers only"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21 is above the limit 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: this version does not serve it yet"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
async def test_what_cannot_be_is_refused(api: HttpApi, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        await api.client.completions.create(model=MODEL, prompt="a", extra_body=fields)
