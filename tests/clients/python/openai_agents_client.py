"""A program with the OpenAI Agents SDK, run by test_public_clients.py: prints what it got as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

ASK = "What is the capital of France?"
"""An answer that max_tokens cut is an error to this client; this one is short."""


class Pet(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def use(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> dict[str, object]:
    def agent(max_tokens: int, tool_choice: str | None = None, **fields: object) -> Agent:
        settings = ModelSettings(
            temperature=0, max_tokens=max_tokens, tool_choice=tool_choice, include_usage=True
        )
        return Agent(name="tester", instructions="Be brief.", model=model, model_settings=settings, **fields)

    run = Runner.run_streamed(agent(60), ASK)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    caller = agent(40, "required", tools=[weather], tool_use_behavior="stop_on_first_tool")
    pet = await Runner.run(agent(80, output_type=Pet), "Tell me about a dog called Rex.")
    return {
        "whole": (await Runner.run(agent(60), ASK)).final_output,
        "streamed": "".join(deltas),
        "streamed_at_end": run.final_output,
        "usage": run.context_wrapper.usage.output_tokens,
        "tool": (await Runner.run(caller, "Weather in Paris?")).final_output,
        "form": pet.final_output.model_dump(),
    }


async def main(base_url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    found = {name: await use(kind(model="embedded", openai_client=client)) for name, kind in kinds.items()}
    print(json.dumps(found))


asyncio.run(main(sys.argv[1]))
