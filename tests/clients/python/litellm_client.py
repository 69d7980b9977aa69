"""A program with LiteLLM, run by test_public_clients.py: prints what it got, by provider, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel, Field

ASK: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Pet(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


def use(provider: str, base: str) -> dict[str, object]:
    terms: dict[str, Any] = {
        "model": f"{provider}/embedded", "api_base": base, "api_key": "none", "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(messages=ASK, max_tokens=12, **terms)
    chunks = list(
        litellm.completion(
            messages=ASK, max_tokens=12, stream=True, stream_options={"include_usage": True}, **terms
        )
    )
    demanded = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    called = litellm.completion(messages=ASK, **demanded, **terms).choices[0].message
    rebuilt = litellm.stream_chunk_builder(
        list(litellm.completion(messages=ASK, stream=True, **demanded, **terms))
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "rain"}
        for call in called.tool_calls
    ]
    answered = litellm.completion(messages=[*ASK, called, *results], tools=[TOOL], max_tokens=12, **terms)
    pet = litellm.completion(messages=ASK, response_format=Pet, max_tokens=80, **terms)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "calls": [[call.function.name, json.loads(call.function.arguments)] for call in called.tool_calls],
        "streamed_calls": [
            [call.function.name, json.loads(call.function.arguments)]
            for call in rebuilt.choices[0].message.tool_calls
        ],
        "answered": answered.choices[0].finish_reason,
        "form": Pet.model_validate_json(pet.choices[0].message.content).model_dump(),
    }


def main(address: str) -> None:
    litellm.suppress_debug_info = True
    v1 = f"{address}/v1"
    found: dict[str, object] = {
        "openai": use("openai", v1),
        "hosted_vllm": use("hosted_vllm", v1),
        "anthropic": use("anthropic", address),
    }
    terms: dict[str, Any] = {"api_key": "none", "num_retries": 0}
    text = litellm.text_completion(
        model="text-completion-openai/embedded", api_base=v1, prompt="The capital of France is", max_tokens=4,
        temperature=0, **terms,
    )  # fmt: skip
    found["text"] = text.choices[0].text
    response = litellm.responses(
        model="openai/embedded", api_base=v1, input="Say hello.", max_output_tokens=12, temperature=0, **terms
    )
    found["responses"] = response.output[0].content[0].text
    message = asyncio.run(
        litellm.anthropic.messages.acreate(
            model="openai/embedded", api_base=v1, messages=ASK, max_tokens=12, temperature=0, **terms
        )
    )
    found["messages"] = message["content"][0]["text"]
    print(json.dumps(found))


main(sys.argv[1])
