"""A prompt that is repeated with its log-probabilities, through the official client and as lm-eval asks for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.helpers.fake_generator import MODEL
from tests.helpers.http_api import HttpApi, open_api
from triptych.types.events import PromptLogprobsEvent
from triptych.types.step import PromptLogprobs
from triptych_services.frontend.http.openai.logprobs import EchoLogprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    shared_api.generator.reset()
    return shared_api


def echo_of(*pieces: bytes) -> EchoLogprobs:
    """Return the echo of a prompt of these tokens, with no alternatives."""
    echo = EchoLogprobs(0, pieces[0])
    count = len(pieces) - 1
    columns = np.zeros((count, 1), np.uint32), np.zeros((count, 1), np.float32), np.ones(count, np.uint32)
    echo.add(PromptLogprobsEvent(PromptLogprobs(1, *columns), pieces[1:]))
    return echo


async def test_lists_begin_with_the_prompt_and_null_stands_for_its_first_token(api: HttpApi) -> None:
    answer = await api.client.completions.create(
        model=MODEL, prompt="hé", echo=True, logprobs=2, max_tokens=2
    )
    (choice,) = answer.choices
    assert choice.text == "hé0 Once"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "0", " Once"]
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[:3] == [
        None,
        {"bytes:\\xc3": -1.0, "A": -0.5},
        {"bytes:\\xa9": -2.0, "A": -1.5},
    ]
    assert len(logprobs.top_logprobs) == 5


async def test_several_prompts_and_choices_each_begin_with_their_own(api: HttpApi) -> None:
    arguments: dict[str, Any] = {
        "prompt": ["ab", "c", "def"],
        "n": 2,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 1,
    }
    answer = await api.client.completions.create(model=MODEL, temperature=1, **arguments)
    assert [choice.text for choice in answer.choices] == ["ab0", "ab1", "c0", "c1", "def0", "def1"]
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.tokens
        assert tokens is not None
        assert "".join(tokens) == choice.text
        assert choice.logprobs.text_offset == list(range(len(choice.text)))
        assert choice.logprobs.token_logprobs == [None, *(-1.0 * i for i in range(1, len(tokens) - 1)), -0.5]


async def test_a_stream_says_what_the_whole_answer_says(api: HttpApi) -> None:
    arguments: dict[str, Any] = {"prompt": ["abc", "d"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3}
    whole = await api.client.completions.create(model=MODEL, temperature=1, **arguments)
    stream = await api.client.completions.create(model=MODEL, temperature=1, stream=True, **arguments)
    chunks = [chunk async for chunk in stream]
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in parts for value in getattr(part.logprobs, name)] == getattr(
                choice.logprobs, name
            )


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_multiple_choice_tasks_read_their_continuations(api: HttpApi, max_tokens: int) -> None:
    """lm-eval's `local-completions`: contexts and continuations as ids; of the lists it reads `[num_context:-1]`."""
    body = {
        "prompt": [[97, 98, 65, 66], [99, 65]],
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
    }
    response = await api.post(
        "/v1/completions", json.dumps({**body, "max_tokens": max_tokens, "model": MODEL})
    )
    assert response.status_code == 200
    answer = response.json()
    last = -1 if max_tokens else None
    for choice, num_context in zip(answer["choices"], (2, 1), strict=True):
        logprobs = choice["logprobs"]
        continuation = logprobs["token_logprobs"][num_context:last]
        best = [max(candidates.values()) for candidates in logprobs["top_logprobs"][num_context:last]]
        assert continuation == [-1.0 * (num_context + i) for i in range(len(continuation))]
        # only A is the best at its place
        assert [own == top for own, top in zip(continuation, best, strict=True)] == [False] * len(best)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


async def test_tokens_that_the_text_leaves_out_begin_where_the_next_one_does() -> None:
    assert echo_of(b"<s>", b"Hel", b"lo", b"</s>", b" you").place_in("Hello you!") == ([0, 0, 3, 5, 5], 9)
    assert echo_of(b"<s>", b"Hi").place_in("<s>Hi") == ([0, 3], 5)
    assert echo_of(b"<s>").place_in("") == ([0], 0)


async def test_the_space_that_a_tokenizer_puts_before_a_text_is_not_in_it() -> None:
    assert echo_of(b"<s>", b" Hello", b" you").place_in("Hello you") == ([0, 0, 5], 9)


async def test_parts_of_a_character_begin_where_it_does() -> None:
    snowman = "☃".encode()
    assert echo_of(b"a", snowman[:1], snowman[1:2], snowman[2:] + b"b", b"c").place_in("a☃bc") == (
        [0, 1, 1, 1, 3],
        4,
    )


async def test_a_text_in_another_normal_form_is_found_again() -> None:
    assert echo_of(b"caf", "é".encode(), b" au", b" lait").place_in("cafe\u0301 au lait") == (
        [0, 3, 3, 8],
        13,
    )
