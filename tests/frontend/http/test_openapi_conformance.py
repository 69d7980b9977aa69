"""schemathesis finds no request that the HTTP API takes or refuses otherwise than /openapi.json says."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.helpers.fake_generator import FakeGenerator
from tests.helpers.http_api import open_api
from triptych_services.frontend.http.app import create_app

schema = schemathesis.openapi.from_dict(create_app(FakeGenerator()).openapi())


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A server on a loop of its own: the clients of schemathesis block."""
    ports: list[int] = []
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with open_api(FakeGenerator()) as api:
            ports.append(api.port)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


WHY_REFUSED = (
    "stream_options: only a stream has options",
    "stream_options.continuous_usage_stats: needs include_usage to be true",
    "prompt_logprobs: comes with whole answers only",
    "logprob_token_ids: (needs logprobs to be true|has no place beside)",
    "repetition_detection.min_pattern_size: .* is above the limit",
    "top_logprobs: .* needs logprobs to be true",
    "maximum context length",
    "asks for .*, and structured_outputs for another form",
    "ignore_eos: goes on past the end of a form",
    "structured_outputs.*: has white space settings, which only json",
    "tool_choice: .* (needs tools|is none of the tools)",
    "tools.*name: .* is there twice",
    "input: the conversation is empty",
    "text.format.schema: is missing",
    "is not in the vocabulary",
    "ignore_eos: goes on past",
    "messages: the conversation is empty",  # of thoughts that only their author can read
    "the last turn is one of the assistant without text to go on with",
    "prompts with .* choices each are above the limit",
    "min_tokens: .* exceeds max_tokens",
    "dimensions: .* is not within",
    "but the model's vocabulary ends at",
    "prompt_name: .* is no prompt of the model",
    "texts are neither 1 nor as many as",
    "max_tokens: .* contradicts max_completion_tokens",
    "response_format.json_schema: is missing; the type json_schema needs it",
    "max_tokens: 0 is below the limit 1; without output there must be echo or prompt_logprobs",
)
"""Reasons that lie in several fields together, or in the model."""


@pytest.mark.thorough
@schema.parametrize()
@settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
def test_requests_are_taken_as_described(case: schemathesis.Case, base_url: str) -> None:
    response = case.call(base_url=base_url)
    is_valid = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    is_expected = False
    if is_valid and response.status_code == 400:
        message = response.json()["error"]["message"]
        is_expected = any(re.search(pattern, message) for pattern in WHY_REFUSED)
    excluded = [positive_data_acceptance] if is_expected else []
    if response.status_code == 504 and "deadline of" in response.json()["error"]["message"]:
        excluded.append(not_a_server_error)  # a time of 5e-324 s is one, and it passes
    case.validate_response(response, excluded_checks=excluded)
