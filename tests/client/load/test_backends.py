"""The HTTP backend against the frontend's server, and against chunks that others send."""

from __future__ import annotations

import json

import pytest

from tests.client.test_http_client import HEAD, server_of
from tests.helpers.fake_generator import MODEL
from tests.helpers.http_api import open_api
from triptych.client.http_client import HttpClient
from triptych.client.load.backends import CHAT, COMPLETIONS, OpenAiBackend, TokenCounts
from triptych.client.load.datasets import LoadRequest
from triptych.errors import EngineFailure, InvalidRequest, ProtocolViolation, TriptychError


@pytest.mark.parametrize(
    ("endpoint", "prompt", "num_input"),
    [
        (COMPLETIONS, "abc", 3),
        (COMPLETIONS, [1, 2, 3, 4], 4),
        (CHAT, "abc", None),
        (CHAT, [{"role": "user", "content": "abc"}], None),
    ],
)
async def test_pieces_and_tokens_are_those_of_the_server(endpoint, prompt, num_input):
    pieces = []
    async with open_api() as api, HttpClient(f"http://127.0.0.1:{api.port}") as client:
        backend = OpenAiBackend(client, endpoint, {"temperature": 0.0}, MODEL)
        counts = await backend.answer(LoadRequest(prompt, 5), lambda: pieces.append(1))
    assert counts.num_output == 5
    assert counts.num_input == num_input or num_input is None
    assert 1 <= len(pieces) <= 5  # neither the role nor the usage is output; some may come together
    assert api.generator.requests[0].sampling["temperature"] == 0.0


async def test_errors_before_and_in_the_stream_are_raised():
    async with open_api() as api, HttpClient(f"http://127.0.0.1:{api.port}") as client:
        backend = OpenAiBackend(client, COMPLETIONS, {}, "other")
        with pytest.raises(TriptychError, match="HTTP 404: "):
            await backend.answer(LoadRequest("a", 5), lambda: None)
        api.generator.error_after_words = (2, EngineFailure("broken"))
        backend = OpenAiBackend(client, COMPLETIONS, {}, MODEL)
        with pytest.raises(TriptychError, match="broken"):
            await backend.answer(LoadRequest("a", 5), lambda: None)


@pytest.mark.parametrize(
    ("endpoint", "prompt"), [(CHAT, [1, 2]), (COMPLETIONS, [{"role": "user", "content": "a"}])]
)
async def test_prompts_that_the_endpoint_does_not_take_are_refused(endpoint, prompt):
    async with HttpClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="need /v1/"):
            await OpenAiBackend(client, endpoint, {}, "m").answer(LoadRequest(prompt, 1), lambda: None)


def events(*chunks):
    body = (
        b"".join(b"data: %s\r\n\r\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    )
    return HEAD + b"Content-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def test_other_servers_chunks_are_understood():
    delta = {"reasoning_content": "hm"}
    answer = events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": delta}], "usage": None},
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
    )
    pieces = []
    async with server_of(answer) as (url, requests), HttpClient(url) as client:
        backend = OpenAiBackend(client, CHAT, {"top_p": 0.5}, "m")
        counts = await backend.answer(LoadRequest("hi", None), lambda: pieces.append(1))
    assert (counts, len(pieces)) == (TokenCounts(7, 9), 2)
    assert json.loads(requests[0][1]) == {
        "model": "m",
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
    }


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        ({"choices": []}, "no usage"),
        ({"x": 1}, "another form"),
        ([], "another form"),
        ({"choices": [3]}, "form"),
    ],
)
async def test_answers_that_cannot_be_counted_are_errors(chunk, told):
    async with server_of(events(chunk)) as (url, _), HttpClient(url) as client:
        with pytest.raises(ProtocolViolation, match=told):
            await OpenAiBackend(client, CHAT, {}, "m").answer(LoadRequest("hi", 1), lambda: None)
