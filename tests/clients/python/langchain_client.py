"""A LangChain program, run by test_public_clients.py: prints what it got as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

ASK = "Tell me about a dog called Rex. Answer in JSON with name and kind."


class Pet(BaseModel):
    """A pet."""

    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


class Tags(BaseModel):
    """Words for a pet. Their schema has a keyword that no grammar holds."""

    tags: set[Literal["small", "large"]]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def main(base_url: str) -> None:
    def chat(**fields: object) -> ChatOpenAI:
        terms = {"model": "embedded", "temperature": 0, "max_tokens": 200, **fields}
        return ChatOpenAI(base_url=base_url, api_key="none", max_retries=0, **terms)

    short = chat(max_tokens=12)
    found: dict[str, object] = {
        "whole": short.invoke("Say hello.").content,
        "streamed": "".join(str(chunk.content) for chunk in short.stream("Say hello.")),
        "batch": len(asyncio.run(short.abatch(["a", "b", "c"]))),
        "completion": OpenAI(
            base_url=base_url, api_key="none", model="embedded", temperature=0, max_tokens=4
        ).invoke("The capital of France is"),
        "responses": chat(max_tokens=12, use_responses_api=True).invoke("Say hello.").text,
    }
    for method in ("json_schema", "function_calling"):
        found[method] = chat().with_structured_output(Pet, method=method).invoke(ASK).model_dump()
    tags = chat().with_structured_output(Tags, method="function_calling").invoke(ASK)
    found["set"] = sorted(tags.tags)
    terms = {"base_url": base_url, "api_key": "none", "model": "embedded", "max_tokens": 4}
    found["best_of"] = len(OpenAI(**terms, n=2, best_of=2).generate(["Hello"]).generations[0])
    found["verbosity"] = chat(max_tokens=12, verbosity="low").invoke("Say hello.").content
    for choice in ("weather", "any"):
        calls = (
            chat()
            .bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
            .invoke("Weather in Paris?")
            .tool_calls
        )
        found[f"tools {choice}"] = [call["name"] for call in calls]
    print(json.dumps(found))


main(sys.argv[1])
