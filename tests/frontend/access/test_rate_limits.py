"""Rate limits of keys: the moving window beside a naive one, and what refused clients are told on both APIs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from tests.frontend.access.test_keys import Doors, open_doors, request
from tests.helpers.grpc_api import error_of
from triptych import errors
from triptych.config.api_keys import entry_line
from triptych.observe.metrics import FrontendMetrics
from triptych.v1 import generation_pb2
from triptych_services.frontend.access.caller import Caller
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.access.rate_limits import WINDOW_S, RateLimits
from triptych_services.frontend.app import note_rate_limited


class NaiveLimits:
    """Every request and every token with its time, looked through anew each time."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests: list[float] = []
        self.tokens: list[float] = []

    def is_free(self, now_s: float) -> bool:
        def num_within(times: list[float]) -> int:
            return sum(now_s - WINDOW_S < at_s for at_s in times)

        return num_within(self.requests) < self.max_requests and num_within(self.tokens) < self.max_tokens


async def refusal(limits: RateLimits, caller: Caller) -> errors.RateLimited | None:
    try:
        await limits.admit(caller)
    except errors.RateLimited as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(5))
async def test_a_request_is_admitted_exactly_when_the_naive_window_is_free(seed):
    chance = random.Random(seed)
    now_s = 0.0
    limits, naive = RateLimits(lambda: now_s), NaiveLimits(7, 100)
    caller = Caller("k", None, requests_per_minute=7, tokens_per_minute=100)
    num_refused = 0
    for _ in range(400):
        now_s += chance.choice((0.0, 0.5, 3.0, 11.0))
        if (refused := await refusal(limits, caller)) is not None:
            num_refused += 1
            assert not naive.is_free(now_s)
            assert not naive.is_free(now_s + refused.retry_after_s - 0.01)
            later_s = now_s + refused.retry_after_s + 0.01
            unit = refused.metadata["unit"]
            kept = NaiveLimits(*((7, 10**9) if unit == "requests" else (10**9, 100)))
            kept.requests, kept.tokens = naive.requests, naive.tokens
            assert kept.is_free(later_s)
            continue
        assert naive.is_free(now_s)
        naive.requests.append(now_s)
        num_tokens = chance.choice((0, 1, 13, 60))
        limits.charge(caller, num_tokens)
        naive.tokens += [now_s] * num_tokens
    assert 20 < num_refused < 380


async def test_a_key_without_limits_is_never_refused():
    limits = RateLimits(lambda: 0.0)
    for _ in range(1000):
        await limits.admit(Caller("k"))
        limits.charge(Caller("k"), 1000)


async def test_a_limit_that_changes_counts_what_is_in_the_window():
    limits = RateLimits(lambda: 0.0)
    for _ in range(3):
        await limits.admit(Caller("k", requests_per_minute=3))
    await limits.admit(Caller("k", requests_per_minute=4))
    with pytest.raises(
        errors.RateLimited, match="4 requests within a minute, the limit is 2; try again in 60"
    ):
        await limits.admit(Caller("k", requests_per_minute=2))


async def test_refusals_are_reported_with_what_was_used_up():
    refused = []
    limits = RateLimits(lambda: 0.0, lambda caller, unit: refused.append((caller.name, unit)))
    few, tokens = Caller("few", requests_per_minute=1), Caller("tokens", tokens_per_minute=5)
    await limits.admit(few)
    limits.charge(tokens, 6)
    for attempt in (
        lambda: limits.admit(few),
        lambda: limits.admit(tokens),
        lambda: limits.admit_tokens(tokens),
    ):
        with pytest.raises(errors.RateLimited):
            await attempt()
    assert refused == [("few", "requests"), ("tokens", "tokens"), ("tokens", "tokens")]


def test_refusals_are_counted_by_tenant_and_limit(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("few", "key-few", tenant="acme") + "\n" + entry_line("g", "key-g", tenant="*"))
    keys, registry = ApiKeys(file), CollectorRegistry()
    metrics = FrontendMetrics.create(registry)
    note_rate_limited(metrics, keys, Caller("few", "acme"), "requests")
    note_rate_limited(metrics, keys, Caller("few", "acme"), "streams that are not kept")
    note_rate_limited(metrics, keys, Caller("g", None), "tokens")
    note_rate_limited(metrics, keys, Caller("gone", "removed from the file"), "tokens")
    found = {
        (sample.labels["tenant"], sample.labels["limit"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "triptych_frontend_rate_limited_requests_total"
    }
    assert found == {
        ("acme", "requests"): 1,
        ("acme", "streams"): 1,
        ("*", "tokens"): 1,
        ("other", "tokens"): 1,
    }


# Both APIs

FEW, TOKENS, FREE = "key-few", "key-tokens", "key-free"
LINES = (
    entry_line("few", FEW, requests_per_minute=2),
    entry_line("tokens", TOKENS, tokens_per_minute=7),
    entry_line("free", FREE),
)


@pytest.fixture
async def doors(tmp_path, monkeypatch) -> AsyncIterator[Doors]:
    monkeypatch.setattr("triptych.config.watched_files.CHECK_INTERVAL_S", 0.0)
    async with open_doors(tmp_path) as doors:
        doors.file.write_text("\n".join(LINES) + "\n")
        yield doors


async def ask_grpc(doors: Doors, key: str) -> list[Any]:
    return [message async for message in doors.stub(key).StreamGenerate(request())]


async def ask_http(doors: Doors, key: str) -> str:
    async with doors.openai(key) as client:
        answer = await client.completions.create(model="tiny", prompt="Hi", max_tokens=3)
    return answer.choices[0].text


async def test_both_apis_share_the_requests_of_a_key(doors):
    await ask_grpc(doors, FEW)
    assert await ask_http(doors, FEW) == "abc"
    call = doors.stub(FEW).StreamGenerate(request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    assert [detail.type_url.rpartition(".")[2] for detail in status.details] == [
        "ErrorInfo", "RetryInfo", "RequestInfo",
    ]  # fmt: skip
    error = await error_of(doors.stub(FEW).StreamGenerate(request()))
    assert type(error) is errors.RateLimited
    assert 0 < error.retry_after_s <= 60
    assert error.message.startswith(
        "API key 'few': 2 requests within a minute, the limit is 2; try again in "
    )
    assert error.metadata == {"limit": "2", "unit": "requests", "value": "2"}
    with pytest.raises(openai.RateLimitError) as refused:
        await ask_http(doors, FEW)
    assert refused.value.code == "rate_limit_exceeded"
    assert 50 < int(refused.value.response.headers["retry-after"]) <= 60
    assert await ask_http(doors, FREE) == "abc"


async def test_tokens_of_prompt_and_output_count(doors):
    await ask_grpc(doors, TOKENS)  # 2 + 3 tokens
    await ask_grpc(doors, TOKENS)  # 10, which the third must wait for
    error = await error_of(doors.stub(TOKENS).StreamGenerate(request()))
    assert error.message.startswith("API key 'tokens': 10 tokens within a minute, the limit is 7; ")
    with pytest.raises(openai.RateLimitError):
        await ask_http(doors, TOKENS)


async def test_items_of_a_batch_count_one_by_one(doors):
    async def items() -> AsyncIterator[Any]:
        for tag in range(1, 5):
            yield generation_pb2.BatchGenerateRequest(tag=tag, request=request())

    failed = {r.tag async for r in doors.stub(FEW).BatchGenerate(items()) if r.error.code}
    assert len(failed) == 2


async def test_a_limit_is_raised_while_the_frontend_serves(doors):
    await ask_grpc(doors, FEW)
    await ask_grpc(doors, FEW)
    assert type(await error_of(doors.stub(FEW).StreamGenerate(request()))) is errors.RateLimited
    doors.file.write_text(entry_line("few", FEW, requests_per_minute=3) + "\n")
    await ask_grpc(doors, FEW)


async def test_tokens_are_admitted_without_counting_a_request():
    limits = RateLimits(lambda: 0.0)
    caller = Caller("k", None, requests_per_minute=1, tokens_per_minute=10)
    for _ in range(5):
        await limits.admit_tokens(caller)
    limits.charge(caller, 10)
    with pytest.raises(errors.RateLimited, match="10 tokens within a minute"):
        await limits.admit_tokens(caller)


async def test_tokens_that_are_only_counted_count(doors):
    headers = {"authorization": f"Bearer {TOKENS}"}
    answer = await doors.http.http.post("/tokenize", json={"prompt": "0123456"}, headers=headers)
    assert answer.json()["count"] == 7
    refused = await doors.http.http.post("/tokenize", json={"prompt": "Hi"}, headers=headers)
    assert refused.status_code == 429
    assert "7 tokens within a minute, the limit is 7" in refused.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError):
        await ask_http(doors, TOKENS)


async def test_guesses_of_streams_count_as_requests_and_what_is_found_does_not() -> None:
    limits, caller = RateLimits(lambda: 0.0), Caller("k", None, requests_per_minute=3)
    for _ in range(10):
        async with limits.guess(caller):
            pass
    for _ in range(3):
        with pytest.raises(errors.NotKept):
            async with limits.guess(caller):
                raise errors.NotKept("made up")
    with pytest.raises(errors.RateLimited, match="3 streams that are not kept"):
        async with limits.guess(caller):
            pass
    assert await refusal(limits, caller) is not None
