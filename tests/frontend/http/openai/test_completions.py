"""Completions through the official client, sync and async."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.http_api import HttpApi, open_api
from triptych.types.sampling import OutputKind
from triptych.types.submit import RequestHead

ALL = "0" + "".join(WORDS)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    shared_api.generator.reset()
    return shared_api


async def stream(api: HttpApi, **arguments: Any) -> list[Any]:
    return [
        chunk async for chunk in await api.client.completions.create(model=MODEL, stream=True, **arguments)
    ]


async def test_a_completion_has_text_usage_and_a_finish_reason(api: HttpApi) -> None:
    answer = await api.client.completions.create(model=MODEL, prompt="héllo")
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.created > 1_700_000_000
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, ALL, "stop", None)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 7, 13)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 2
    assert usage.completion_tokens_details.rejected_prediction_tokens == 1


async def test_the_synchronous_client_gets_the_same(api: HttpApi) -> None:
    def ask() -> tuple[str, str]:
        with api.sync_client() as client:
            whole = client.completions.create(model=MODEL, prompt="hi")
            parts = client.completions.create(model=MODEL, prompt="hi", stream=True)
            return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in parts)

    assert await asyncio.to_thread(ask) == (ALL, ALL)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_streamed_text_is_the_unstreamed_text_and_ends_once(api: HttpApi, max_tokens: int) -> None:
    arguments: dict[str, Any] = {"prompt": "hi", "n": 3, "max_tokens": max_tokens, "temperature": 0.5}
    whole = await api.client.completions.create(model=MODEL, **arguments)
    chunks = await stream(api, **arguments)
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_include_usage_adds_one_last_chunk_with_no_choices(api: HttpApi) -> None:
    chunks = await stream(api, prompt="hi", n=2, stream_options={"include_usage": True})
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 14


async def test_several_prompts_are_several_generations(api: HttpApi) -> None:
    prompts = ["a", "bb", "ccc"]
    answer = await api.client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=1, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "a0"), (1, "a1"), (2, "bb0"), (3, "bb1"), (4, "ccc0"), (5, "ccc1"),
    ]  # fmt: skip
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    chunks = await stream(api, prompt=prompts, n=2, max_tokens=2)
    texts = {i: "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(6)}
    assert texts == {i: f"{i % 2} Once" for i in range(6)}


async def test_more_prompts_than_ever_fit_are_refused_for_good(api: HttpApi) -> None:
    api.generator.most_choices = 5
    with pytest.raises(openai.BadRequestError, match="3 prompts with 2 choices each are above the limit 5"):
        await api.client.completions.create(model=MODEL, prompt=["a", "b", "c"], n=2)


async def test_request_ids_are_numbered_for_several_prompts(api: HttpApi) -> None:
    headers = {"X-Request-Id": "mine"}
    for prompt in ("a", ["a", "b"]):
        answer = await api.client.completions.create(model=MODEL, prompt=prompt, extra_headers=headers)
        assert answer.id == "cmpl-mine"
    lone, first, second = [raw.head.request_id for raw in api.generator.requests]
    assert re.fullmatch("mine-[0-9a-f]{8}", lone)
    assert first.removesuffix("-0") == second.removesuffix("-1")


async def test_integers_may_be_written_as_floats(api: HttpApi) -> None:
    for prompt in ([104.0, 105.0], [[104, 105.0]]):
        response = await api.post(
            "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 2.0, "n": 1.0})
        )
        assert response.status_code == 200
    assert [list(raw.prompt) for raw in api.generator.requests] == [[104, 105], [104, 105]]


async def test_tenants_are_named_by_tenant_else_by_user(api: HttpApi) -> None:
    for fields in ({}, {"user": "u"}, {"user": "u", "tenant": "t"}):
        await api.post("/v1/completions", json.dumps({"prompt": "a", **fields}))
    assert [raw.head.tenant for raw in api.generator.requests] == ["", "u", "t"]
    for name in ("user", "tenant"):
        refused = await api.post("/v1/completions", json.dumps({"prompt": "a", name: "x" * 257}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_token_ids_are_taken_as_they_are(api: HttpApi) -> None:
    for prompt in ([104, 105], [[104, 105], [7]]):
        await api.client.completions.create(model=MODEL, prompt=prompt)
    assert [list(raw.prompt) for raw in api.generator.requests] == [[104, 105], [104, 105], [7]]


@pytest.mark.parametrize("stop", ["time", ["never", "time"]])
async def test_a_stop_string_ends_the_text(api: HttpApi, stop: Any) -> None:
    answer = await api.client.completions.create(model=MODEL, prompt="hi", stop=stop)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("0 Once upon a", "stop")
    assert choice.stop_reason == "time"  # type: ignore[attr-defined]


async def test_logprobs_stand_beside_their_tokens(api: HttpApi) -> None:
    answer = await api.client.completions.create(model=MODEL, prompt="hi", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["0", " Once", " upon"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 6]
    assert logprobs.top_logprobs is not None
    # Minus infinity has no JSON; OpenAI's stand-in does.
    assert logprobs.top_logprobs[1] == {" Once": -0.5, "t1": -0.25, "bytes:\\xe2\\x80": -9999.0}


async def test_streamed_logprobs_are_the_unstreamed_ones(api: HttpApi) -> None:
    whole = await api.client.completions.create(model=MODEL, prompt="hi", logprobs=1, n=2)
    chunks = await stream(api, prompt="hi", logprobs=1, n=2)
    for choice in whole.choices:
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].index == choice.index]
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for part in parts for entry in getattr(part, name)] == getattr(
                choice.logprobs, name
            )


async def test_extra_sampling_fields_reach_the_generator(api: HttpApi) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [3],
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "allowed_token_ids": [1, 2],
    }  # fmt: skip
    envelope = {"priority": -2, "cache_salt": "s", "truncate_prompt_tokens": 1}
    await api.client.completions.create(
        model=MODEL,
        prompt="hi",
        seed=2**64 - 1,
        logit_bias={"5": -100},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        top_p=0.9,
        temperature=0.7,
        extra_body=extra | envelope,
        extra_headers={"X-Request-Timeout-S": "2500.5"},
    )
    (raw,) = api.generator.requests
    given = {name: value for name, value in raw.sampling.items() if value is not None}
    assert given == extra | {
        "seed": 2**64 - 1, "logit_bias": {"5": -100}, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "top_p": 0.9, "temperature": 0.7,
    }  # fmt: skip
    assert raw.head == RequestHead(raw.head.request_id, priority=-2, cache_salt="s")
    assert raw.truncate_prompt_tokens == 1
    assert 0 < raw.deadline_s <= 2500.5
    assert (raw.output_kind, raw.api) == (OutputKind.FINAL_ONLY, "http")


async def test_ignored_fields_and_nulls_change_nothing(api: HttpApi) -> None:
    await api.client.completions.create(
        model=MODEL,
        prompt="hi",
        user="me",
        stop=None,
        best_of=1,
        suffix=None,
        temperature=None,
        logit_bias=None,
    )
    (raw,) = api.generator.requests
    assert all(value is None for value in raw.sampling.values())


async def test_models_can_be_listed_and_looked_up(api: HttpApi) -> None:
    (model,) = (await api.client.models.list()).data
    assert (model.id, model.object, model.owned_by, model.created) == (
        MODEL,
        "model",
        "triptych",
        1_700_000_000,
    )
    assert (await api.client.models.retrieve(MODEL)) == model
    with pytest.raises(openai.NotFoundError, match=f"'other'; served: {MODEL}"):
        await api.client.models.retrieve("other")


async def test_tokenize_and_detokenize_are_inverse(api: HttpApi) -> None:
    answer = (await api.http.post("/tokenize", json={"prompt": "hé"})).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": list("hé".encode())}
    back = await api.http.post("/detokenize", json={"tokens": answer["tokens"], "model": MODEL})
    assert back.json() == {"prompt": "hé"}
    chat = await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    assert chat.json()["tokens"] == list(b"user:x")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [(-1, None), (-2, (1 << 64) - 2), (-(1 << 63), 1 << 63), (0, 0), ((1 << 64) - 1, (1 << 64) - 1)],
)
async def test_seeds_may_have_a_sign(api: HttpApi, sent: int, meant: int | None) -> None:
    await api.client.completions.create(model=MODEL, prompt="a", seed=sent)
    assert api.generator.requests[-1].sampling["seed"] == meant


async def test_names_of_vllm_are_known(api: HttpApi) -> None:
    fields = {
        "truncate_prompt_tokens": 5, "truncation_side": "right", "add_special_tokens": False, "request_id": "mine",
        "session_id": "s", "guided_json": None, "return_token_ids": False, "use_beam_search": False,
    }  # fmt: skip
    await api.client.completions.create(model=MODEL, prompt="a", extra_body=fields)
    raw = api.generator.requests[-1]
    assert (raw.truncate_prompt_tokens, raw.keeps_beginning, raw.add_special_tokens) == (5, True, False)
    assert raw.head.request_id.startswith("mine")
