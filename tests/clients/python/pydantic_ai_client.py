"""A program with pydantic-ai, run by test_public_clients.py: prints what it got as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Tell me about a dog called Rex."


class Pet(BaseModel):
    """A pet."""

    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def use(model: OpenAIChatModel | OpenAIResponsesModel) -> dict[str, object]:
    def agent(max_tokens: int, **fields: Any) -> Agent[None, Any]:
        return Agent(model, model_settings={"max_tokens": max_tokens, "temperature": 0}, **fields)

    async with agent(12).run_stream("Say hello.") as stream:
        texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        num_tokens = stream.usage.output_tokens
    async with agent(80, output_type=Pet).run_stream(ASK) as stream:
        streamed_pet = await stream.get_output()
    return {
        "whole": (await agent(12).run("Say hello.")).output,
        "streamed": "".join(texts),
        "usage": num_tokens,
        "tool": (await agent(60, output_type=weather).run("Weather in Paris?")).output,
        "form_by_tool": (await agent(80, output_type=Pet).run(ASK)).output.model_dump(),
        "streamed_form": streamed_pet.model_dump(),
        "form": (await agent(80, output_type=NativeOutput(Pet)).run(ASK)).output.model_dump(),
    }


async def main(base_url: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    kinds = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    print(json.dumps({name: await use(kind("embedded", provider=provider)) for name, kind in kinds.items()}))


asyncio.run(main(sys.argv[1]))
