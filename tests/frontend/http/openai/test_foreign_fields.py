"""Fields of other servers and libraries that change nothing; what an engine refuses in the client's words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import open_api
from tests.helpers.tool_answers import ADD, TALKATIVE, TOKENIZER, USER, http_api, prompt_of
from triptych_services.frontend.http.openai.convert import AnswerOptions, answer_options
from triptych_services.frontend.http.openai.objects import ChatFormat
from triptych_services.frontend.http.openai.schema import ChatCompletionRequest
from triptych_services.frontend.http.openai.streams import write_answer

CALL: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
PLAIN: Any = {"messages": USER, "tools": [ADD]}


def after(turn: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", **turn}, *USER]}


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"verbosity": "low", "prediction": {"type": "content", "content": "x"}}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, {}),
        ({"tools": [{**ADD, "cache_control": {"type": "ephemeral"}}]}, {}),
        (
            after({"content": "x", "id": "1", "provider_specific_fields": {"refusal": None}, "reasoning_details": [],
                   "thinking_blocks": []}),
            after({"content": "x"}),
        ),
        (after({"content": [{"type": "refusal", "refusal": "no"}]}), after({"content": "no"})),
        (
            after({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]}),
            after({"content": "x"}),
        ),
        (
            after({"content": "", "tool_calls": [{**CALL, "provider_specific_fields": {}}]}),
            after({"content": "", "tool_calls": [CALL]}),
        ),
    ],
)  # fmt: skip
async def test_what_others_add_changes_nothing(fields: dict[str, Any], plain: dict[str, Any]) -> None:
    async with http_api("Yes") as (api, engine):
        prompts = []
        for body in (fields, plain):
            answer = await api.http.post("/v1/chat/completions", json={"model": "tiny", **PLAIN, **body})
            assert answer.status_code == 200, answer.text
            prompts.append(prompt_of(engine))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "refusal"}, "a part of type refusal has a refusal"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "does not serve it yet"),
    ],
)
async def test_parts_that_say_nothing_or_are_not_served_are_refused(part: dict[str, Any], why: str) -> None:
    async with http_api("Yes") as (api, _):
        body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
        answer = await api.http.post("/v1/chat/completions", json=body)
    assert answer.status_code in (400, 501)
    assert why in answer.text or "must be text" in answer.text


async def test_the_best_of_as_many_is_all_of_them() -> None:
    async with http_api("Yes") as (api, _):
        body = {"model": "tiny", "prompt": "a", "n": 2, "temperature": 1.0}
        good = await api.http.post("/v1/completions", json={**body, "best_of": 2})
        bad = await api.http.post("/v1/completions", json={**body, "best_of": 3})
    assert len(good.json()["choices"]) == 2
    assert bad.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize(
    ("fields", "refused", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "structured_outputs", "response_format"),
        ({"logit_bias": {"5": 1}}, "sampling.logit_bias", "logit_bias"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
    ],
)
async def test_what_an_engine_refuses_is_named_as_the_client_wrote_it(
    fields: dict[str, Any], refused: str, param: str
) -> None:
    async with (
        FakeEngine(model=TALKATIVE) as engine,
        frontend_core(engine, tokenizer=TOKENIZER) as core,
        open_api(core.generator) as api,
    ):
        body = {"model": "tiny", "messages": USER, **fields}
        task = asyncio.create_task(api.http.post("/v1/chat/completions", json=body))
        why = "is not served by this engine"
        engine.fail(await engine.next_submit(), "INVALID_REQUEST", f"{refused}: {why}", field=refused)
        answer = await task
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(f"{param}: is not served")


def test_streams_go_on_at_the_version_before() -> None:
    body = ChatCompletionRequest.model_validate({"messages": USER, "tools": [ADD], "tool_choice": "required"})
    options = answer_options(body)
    assert not options.has_content
    written = write_answer(ChatFormat(options), options, "chatcmpl-1", 0)
    assert "has_content" not in written["options"], "it would refuse what it does not know"
    AnswerOptions(**written["options"])
