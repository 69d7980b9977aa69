"""A program with smolagents, run by test_public_clients.py: prints what it got as JSON."""

from __future__ import annotations

import json
import sys
from typing import Literal

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool
from smolagents.models import agglomerate_stream_deltas

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city
    """
    return f"rain in {city}"


def arguments(given: str | dict[str, object]) -> dict[str, object]:
    return json.loads(given) if isinstance(given, str) else given


def main(base_url: str) -> None:
    def model(max_tokens: int) -> OpenAIServerModel:
        return OpenAIServerModel(
            "embedded", api_base=base_url, api_key="none", max_tokens=max_tokens, temperature=0
        )

    def ask(text: str) -> list[ChatMessage]:
        return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]

    streamed = model(12).generate_stream(ask("Say hello."))
    found: dict[str, object] = {
        "whole": model(12).generate(ask("Say hello.")).content,
        "streamed": "".join(delta.content or "" for delta in streamed),
        "form": json.loads(model(80).generate(ask("A dog called Rex."), response_format=FORM).content),
    }
    asking = ask("Weather in Paris?")
    called = model(60).generate(asking, tools_to_call_from=[weather])
    deltas = list(model(60).generate_stream(asking, tools_to_call_from=[weather]))
    for name, message in (("calls", called), ("streamed_calls", agglomerate_stream_deltas(deltas))):
        functions = [call.function for call in message.tool_calls]
        found[name] = [[function.name, arguments(function.arguments)] for function in functions]
    print(json.dumps(found))


main(sys.argv[1])
