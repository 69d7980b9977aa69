"""HTTP errors: each has its status, in OpenAI's shape, and the next request works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.helpers.fake_engine import eventually
from tests.helpers.fake_generator import MAX_MODEL_LEN, MODEL, VOCAB_SIZE
from tests.helpers.http_api import HttpApi, open_api
from triptych.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DuplicateRequest,
    EngineFailure,
    EngineUnavailable,
    GenerationLost,
    QueueFull,
)
from triptych_services.frontend.http.guards import MAX_BODY_BYTES
from triptych_services.frontend.http.openai.schema import MAX_PROMPTS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


@pytest.fixture
def api(shared_api: HttpApi) -> HttpApi:
    """One server for all: whatever a test does to it, the next one finds it serving."""
    shared_api.generator.reset()
    return shared_api


def told(response: httpx.Response) -> dict[str, Any]:
    """The error, which has all members of OpenAI's and no others."""
    (key, error), *rest = response.json().items()
    assert (key, rest) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ('"prompt": ""', "prompt", "empty"),
        ('"prompt": []', "prompt", "empty"),
        ('"prompt": [[]]', "prompt[0]", "empty"),
        ('"prompt": ["a", ""]', "prompt[1]", "empty"),
        ('"prompt": null', "prompt", "no prompt"),
        ('"prompt": {"text": "a"}', "prompt", "must be a string, a list of"),
        ('"prompt": [1, "a"]', "prompt", "must be a string, a list of"),
        ('"prompt": [[1], ["a"]]', "prompt", "must be a string, a list of"),
        (f'"prompt": [1, {VOCAB_SIZE}]', "prompt[1]", f"0..{VOCAB_SIZE - 1}"),
        ('"prompt": [[1], [-1, 2]]', "prompt[1][0]", "-1 is not in the vocabulary"),
        (f'"prompt": "{"x" * MAX_MODEL_LEN}"', "prompt", f"{MAX_MODEL_LEN} tokens"),
        (f'"prompt": {[[1]] * (MAX_PROMPTS + 1)}', "prompt", f"at most {MAX_PROMPTS}"),
        ('"prompt": "\\ud83d"', "prompt", "surrogate"),
        ('"prompt": "a", "temperature": NaN', "temperature", "nan is not a finite number"),
        ('"prompt": "a", "temperature": Infinity', "temperature", "inf is not a finite number"),
        ('"prompt": "a", "temperature": -1', "temperature", "-1 is below the limit 0"),
        ('"prompt": "a", "temperature": 3', "temperature", "3 is above the limit 2"),
        ('"prompt": "a", "temperature": "1"', "temperature", "'1' is refused"),
        ('"prompt": "a", "top_p": 0', "top_p", "0 must be above 0"),
        ('"prompt": "a", "max_tokens": 0', "max_tokens", "0 is below the limit 1"),
        ('"prompt": "a", "max_tokens": 5.5', "max_tokens", "5.5 is refused"),
        ('"prompt": "a", "max_tokens": true', "max_tokens", "True is refused"),
        ('"prompt": "a", "max_tokens": 100', "max_tokens", f"maximum context length is {MAX_MODEL_LEN}"),
        ('"prompt": "a", "n": 2, "temperature": 0', "n", "greedy"),
        ('"prompt": "a", "logprobs": 21', "logprobs", "21 is above the limit 20"),
        ('"prompt": "a", "seed": -9223372036854775809', "seed", "9 is below the limit -9223372036854775808"),
        ('"prompt": "a", "stop": ["a", ""]', "stop[1]", "empty"),
        ('"prompt": "a", "stop": 5', "stop", "must be a string or a list of strings"),
        ('"prompt": "a", "allowed_token_ids": []', "allowed_token_ids", "no token to choose"),
        ('"prompt": "a", "allowed_token_ids": [-1]', "allowed_token_ids[0]", "-1"),
        ('"prompt": "a", "allowed_token_ids": [10000000]', "allowed_token_ids[0]", "10000000"),
        ('"prompt": "a", "logit_bias": {"x": 1}', "logit_bias[x]", "'x' is not a token id"),
        ('"prompt": "a", "stream_options": {"include_usage": true}', "stream_options", "set stream to true"),
        ('"prompt": "a", "stream": true, "stream_options": {"usage": 1}', "stream_options.usage", "no such field"),
        ('"prompt": "a", "temprature": 1', "temprature", "did you mean temperature?"),
        ('"prompt": "a", "xyzzy": null', "xyzzy", "no such field"),
        ('"prompt": "a", "best_of": 2', "best_of", "does not serve it yet"),
        ('"prompt": "a", "suffix": "b"', "suffix", "does not serve it yet"),
        ('"prompt": "a", "echo": true, "logprobs": 21', "logprobs", "21 is above the limit 20"),
        ('"prompt": "a", "max_tokens": 0', "max_tokens", "0 is below the limit 1; without output"),
        ('"prompt": "a", "max_tokens": 0, "echo": true, "min_tokens": 1', "min_tokens", "exceeds max_tokens 0"),
    ],
)  # fmt: skip
async def test_bad_fields_are_named_with_value_and_limit(
    api: HttpApi, fields: str, param: str, why: str
) -> None:
    response = await api.post("/v1/completions", "{" + fields + "}")
    error = told(response)
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert why in error["message"]


async def test_a_misspelt_prompt_is_missing_too(api: HttpApi) -> None:
    message = told(await api.post("/v1/completions", '{"prompts": "a"}'))["message"]
    assert "prompts: there is no such field; did you mean prompt?" in message
    assert "prompt: no prompt is given" in message


async def test_all_violations_are_told_at_once(api: HttpApi) -> None:
    body = (
        '{"prompt": [1, "x"], "bogus": 1, "n": "two", "temperature": NaN, "top_p": 0, "max_tokens": 0,'
        ' "stop": 5, "cache_salt": 7, "stream_options": {"include_usage": true}}'
    )
    headers = {"X-Request-Timeout-S": "-1"}
    message = told(await api.post("/v1/completions", body, **headers))["message"]
    names = {part.partition(":")[0] for part in message.split("; ")}
    assert names >= {
        "prompt", "bogus", "n", "temperature", "top_p", "max_tokens", "stop", "cache_salt", "stream_options",
        "X-Request-Timeout-S",
    }  # fmt: skip
    assert message.count("prompt: ") == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "a"', "line 1, column 15"),
        (b'{"prompt": "a', "Unterminated string starting at line 1, column 12"),
        (b'{\n"prompt": nope}', "line 2, column 11"),
        (b"", "is missing"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b"[" * 100_000, "nested deeper than the limit 64"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
async def test_a_malformed_body_is_a_400_that_says_where(api: HttpApi, body: bytes, why: str) -> None:
    response = await api.post("/v1/completions", body)
    assert response.status_code == 400
    assert why in told(response)["message"]


async def test_a_body_of_another_type_is_told_the_right_one(api: HttpApi) -> None:
    response = await api.http.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in told(response)["message"]


async def test_heaps_of_wrong_fields_are_cut_short(api: HttpApi) -> None:
    many = ",".join(f'"f{i}": 1' for i in range(200))
    assert 1_000 < len(told(await api.post("/v1/completions", "{" + many + "}"))["message"]) < 10_000
    too_many = ",".join(f'"f{i}": 1' for i in range(100_000))
    assert "100000 fields" in told(await api.post("/v1/completions", "{" + too_many + "}"))["message"]
    messages = "[" + "{}," * 10_000 + "{}]"
    error = told(await api.post("/v1/chat/completions", '{"messages": ' + messages + "}"))
    assert error["param"] == "messages[0].role"
    assert len(error["message"]) < 10_000


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
async def test_a_bad_timeout_header_is_a_400(api: HttpApi, value: str) -> None:
    response = await api.post("/v1/completions", '{"prompt": "a"}', **{"X-Request-Timeout-S": value})
    assert (response.status_code, told(response)["param"]) == (400, "X-Request-Timeout-S")


async def test_request_ids_are_taken_drawn_and_returned(api: HttpApi) -> None:
    given = await api.post("/v1/completions", '{"prompt": "a"}', **{"X-Request-Id": "my-1"})
    assert (given.headers.get_list("x-request-id"), given.json()["id"]) == (["my-1"], "cmpl-my-1")
    first, second = [await api.http.get("/health") for _ in range(2)]
    assert len({first.headers["x-request-id"], second.headers["x-request-id"]}) == 2
    long = await api.post("/v1/completions", '{"prompt": ["a", "b"]}', **{"X-Request-Id": "x" * 128})
    assert (long.status_code, long.json()["id"]) == (200, "cmpl-" + "x" * 128)
    bad = await api.post("/v1/completions", '{"prompt": "a"}', **{"X-Request-Id": "x" * 129})
    assert (bad.status_code, told(bad)["param"]) == (400, "X-Request-Id")


async def test_requests_that_share_an_id_run_side_by_side(api: HttpApi) -> None:
    api.generator.hold_after_words = 1
    shared = {"X-Request-Id": "trace-1"}
    calls = [asyncio.create_task(api.post("/v1/completions", '{"prompt": "a"}', **shared)) for _ in range(2)]
    await eventually(lambda: api.generator.num_running == 2)
    api.generator.released.set()
    assert [(await call).status_code for call in calls] == [200, 200]
    first, second = api.generator.requests
    assert first.head.request_id != second.head.request_id


async def test_a_context_overflow_is_told_in_openai_s_words(api: HttpApi) -> None:
    error = told(await api.post("/v1/completions", '{"prompt": "aaaaaaa", "max_tokens": 1000}'))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"].startswith(
        "This model's maximum context length is 64 tokens. However, you requested 1007 tokens "
        "(7 in the prompt, 1000 in the completion); reduce "
    )


async def test_an_unknown_model_is_a_404(api: HttpApi) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.client.completions.create(model="other", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("error", "expected", "status", "code"),
    [
        (QueueFull("the queue is at its bound 64", 1.2), openai.RateLimitError, 429, "queue_full"),
        (DeadlineUnreachable("too late", 3.0), openai.RateLimitError, 429, "deadline_unreachable"),
        (DuplicateRequest("my-1 is alive"), openai.ConflictError, 409, "duplicate_request"),
        (EngineUnavailable("no engine"), openai.InternalServerError, 503, "engine_unavailable"),
        (GenerationLost("engine lost"), openai.InternalServerError, 503, "generation_lost"),
        (DeadlineExceeded("2 s"), openai.InternalServerError, 504, "deadline_exceeded"),
        (EngineFailure("step failed"), openai.InternalServerError, 500, "engine_failure"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors_before_the_first_output_have_their_status(
    api: HttpApi,
    error: Exception,
    expected: type[openai.APIStatusError],
    status: int,
    code: str,
    is_stream: bool,
) -> None:
    api.generator.admission_errors = [error]
    with pytest.raises(expected) as caught:
        await api.client.completions.create(model=MODEL, prompt="a", stream=is_stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert str(error) in caught.value.message
    retry_after = {
        "queue_full": "2",
        "deadline_unreachable": "3",
        "engine_unavailable": "1",
        "generation_lost": "1",
    }.get(code)
    assert caught.value.response.headers.get("retry-after") == retry_after


async def test_the_client_comes_back_after_the_retry_time(api: HttpApi) -> None:
    api.generator.admission_errors = [QueueFull("full", 0.1)]
    patient = api.client.with_options(max_retries=1)
    answer = await patient.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert answer.choices[0].text == "0"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bug_is_a_500_that_is_logged_once_with_the_request_id(
    api: HttpApi, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    api.generator.admission_errors = [ZeroDivisionError("secret")]
    body = f'{{"prompt": "a", "stream": {"true" if is_stream else "false"}}}'
    with caplog.at_level(logging.WARNING):
        response = await api.post("/v1/completions", body, **{"X-Request-Id": "id-7"})
    error = told(response)
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "internal")
    assert "id-7" in error["message"]
    assert "secret" not in error["message"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.fields == {"request_id": "id-7"}  # type: ignore[attr-defined]


async def test_unknown_routes_and_methods_have_the_same_shape(api: HttpApi) -> None:
    missing = await api.http.get("/v1/nothing")
    assert (missing.status_code, told(missing)["code"]) == (404, "not_found")
    assert "GET /v1/nothing" in told(missing)["message"]
    wrong = await api.http.get("/v1/completions")
    assert (wrong.status_code, told(wrong)["code"], wrong.headers["allow"]) == (
        405,
        "method_not_allowed",
        "POST",
    )


async def test_a_body_of_20_mb_is_a_413(api: HttpApi) -> None:
    response = await api.post("/v1/completions", b" " * 20_000_000)
    assert response.status_code == 413
    assert "20000000 bytes are above the limit 10485760 bytes" in told(response)["message"]
    assert (await api.http.get("/health")).status_code == 200


async def test_a_body_of_unknown_length_is_counted(api: HttpApi) -> None:
    async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "a", "max_tokens": 1'
        for _ in range(num_bytes // (1 << 16)):
            yield b" " * (1 << 16)
        yield b"}"

    headers = {"Content-Type": "application/json"}
    fits = await api.http.post("/v1/completions", content=pieces(MAX_BODY_BYTES - (1 << 16)), headers=headers)
    assert fits.status_code == 200
    response = await api.http.post("/v1/completions", content=pieces(20_000_000), headers=headers)
    assert response.status_code == 413
    assert told(response)["code"] == "body_too_large"


async def test_health_tells_why_it_is_not_ready(api: HttpApi) -> None:
    assert (await api.http.get("/health")).json() == {"status": "ready"}
    api.generator.why_waiting = lambda: "engine-0 is asleep"
    assert (await api.http.get("/health")).json() == {"status": "ready", "why_waiting": "engine-0 is asleep"}
    api.generator.unready_because = "engine-0: loading weights, 40%"
    response = await api.http.get("/health")
    assert response.status_code == 503
    assert told(response)["message"] == "engine-0: loading weights, 40%"


@pytest.mark.parametrize("body", ['{"prompt": "a", "messages": []}', "{}"])
async def test_tokenize_wants_one_kind_of_prompt(api: HttpApi, body: str) -> None:
    response = await api.post("/tokenize", body)
    assert (response.status_code, told(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/tokenize",
            '{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
            "messages[0].tool_calls[0].id",
        ),
        ("/tokenize", '{"prompt": 5}', "prompt"),
        ("/tokenize", '{"prompt": "a", "typo": 5}', "typo"),
        ("/detokenize", '{"tokens": ["a"]}', "tokens[0]"),
        ("/detokenize", '{"tokens": [300]}', "tokens"),
    ],
)
async def test_the_token_routes_name_bad_fields(api: HttpApi, path: str, body: str, param: str) -> None:
    response = await api.post(path, body)
    assert (response.status_code, told(response)["param"]) == (400, param)
