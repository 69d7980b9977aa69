"""A program with instructor, run by test_public_clients.py: prints what it got, by mode, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

ASK: list[Any] = [{"role": "user", "content": "Tell me about a dog called Rex."}]
TERMS: dict[str, Any] = {"model": "embedded", "messages": ASK, "max_tokens": 80}


class Pet(BaseModel):
    """A pet, and nothing else: a form that allows more is not at its end before the model is."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


def main(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    found: dict[str, object] = {}
    for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        asking = instructor.from_openai(client, mode=instructor.Mode[name])
        pet = asking.chat.completions.create(response_model=Pet, max_retries=0, temperature=0, **TERMS)
        found[name] = pet.model_dump()
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    partial = list(asking.chat.completions.create_partial(response_model=Pet, temperature=0, **TERMS))
    found["partial"] = partial[-1].model_dump()
    found["num_partial"] = len(partial)
    messages = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    asking = instructor.from_anthropic(messages, mode=instructor.Mode.ANTHROPIC_TOOLS)
    found["ANTHROPIC_TOOLS"] = asking.messages.create(response_model=Pet, max_retries=0, **TERMS).model_dump()
    print(json.dumps(found))


main(sys.argv[1])
