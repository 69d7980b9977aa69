"""OpenAI's Responses API and Anthropic's Messages API with the real model, by their official clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.test_stack import ANSWER, QUESTION
from triptych.launcher.local_cluster import LocalCluster

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def openai_client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(cluster: LocalCluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://{cluster.http_address}", api_key="none", max_retries=0
    ) as client:
        yield client


def test_responses_say_what_chat_completions_say(openai_client: openai.OpenAI) -> None:
    call: Any = {"model": "embedded", "input": QUESTION, "temperature": 0}
    response = openai_client.responses.create(**call)
    assert (response.status, response.output_text) == ("completed", ANSWER)
    with openai_client.responses.stream(**call) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == ANSWER
    assert final.usage.output_tokens == response.usage.output_tokens  # type: ignore[union-attr]
    assert final.usage.total_tokens == response.usage.total_tokens  # type: ignore[union-attr]
    cut = openai_client.responses.create(**call, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert ANSWER.startswith(cut.output_text)


@pytest.mark.thorough
def test_a_response_has_to_call_a_tool(openai_client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    response = openai_client.responses.create(
        model="embedded", input="How is the weather in Rome?", tools=[tool], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call"
    assert call.arguments in ('{"city": "Rome"}', '{"city": "Paris"}', '{"city":"Rome"}', '{"city":"Paris"}')
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = openai_client.responses.create(
        model="embedded", input=[call, result], tools=[tool], max_output_tokens=5
    )
    assert again.output


def test_messages_say_what_chat_completions_say(anthropic_client: anthropic.Anthropic) -> None:
    call: Any = {"model": "embedded", "messages": QUESTION}
    message = anthropic_client.messages.create(**call, max_tokens=20, extra_body={"temperature": 0})
    assert (message.stop_reason, message.content[0].type) == ("end_turn", "text")
    with anthropic_client.messages.stream(**call, max_tokens=20, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text == ANSWER  # type: ignore[union-attr]
    usage = final.usage
    counted = anthropic_client.messages.count_tokens(**call).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    stopped = anthropic_client.messages.create(
        **call, max_tokens=20, stop_sequences=[" of"], extra_body={"temperature": 0}
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " of")
    assert stopped.content[0].text == "The capital"  # type: ignore[union-attr]


@pytest.mark.thorough
def test_a_message_has_to_use_a_tool(anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(
        model="embedded",
        max_tokens=60,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[{"name": "weather", "input_schema": WEATHER}],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert block.input in ({"city": "Rome"}, {"city": "Paris"})
