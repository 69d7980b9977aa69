"""Parts of a conversation in a body: messages, calls of tools, and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import ConfigDict, model_validator

from triptych_services.frontend.http.body import JsonObject, ignored, must_be, not_served
from triptych_services.frontend.http.fields import FirstOnly, Name, Text, document_as, schema
from triptych_services.frontend.requests.tools import MAX_TOOLS

_THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts that hold what a model of another server thought."""


def _require_text_of_type(document: dict[str, Any]) -> None:
    document["required"] = ["type"]
    texts = [
        {"required": [name], "properties": {"type": {"const": name}, name: {"type": "string"}}}
        for name in ("text", "refusal")
    ]
    document["anyOf"] = [*texts, {"properties": {"type": {"enum": list(_THOUGHTS)}}}]


class ContentPart(JsonObject):
    """One piece of a message's content: text, or a refusal, which is text to the model. Thoughts are left out."""

    model_config = JsonObject.model_config | {"extra": "allow", "json_schema_extra": _require_text_of_type}

    type: Annotated[str, schema(enum=["text", "refusal", *_THOUGHTS])]
    text: str | None = None
    refusal: str | None = None

    @property
    def unserved_kind(self) -> str | None:
        return None if self.type in ("text", "refusal", *_THOUGHTS) else self.type

    @property
    def shown(self) -> str | None:
        """The text that the model sees; None if it sees none."""
        return {"text": self.text, "refusal": self.refusal}.get(self.type)

    @model_validator(mode="after")
    def _text_has_text(self) -> ContentPart:
        if self.type in ("text", "refusal") and self.shown is None:
            raise ValueError(f"a part of type {self.type} has a {self.type}")
        return self


class FunctionCall(JsonObject):
    """The function that a call calls."""

    model_config = document_as("name", "arguments")

    name: Name
    arguments: str
    """JSON text."""
    provider_specific_fields: Any = ignored()


class ToolCallPart(JsonObject):
    """A call that the assistant made."""

    model_config = document_as("id", "type", "function")

    id: str
    """Referred to by the message that answers it."""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Any = ignored()
    provider_specific_fields: Any = ignored()


def _require_content_or_calls(document: dict[str, Any]) -> None:
    document["required"] = ["role"]
    document["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ]


class Message(JsonObject):
    """One turn of a conversation."""

    model_config = ConfigDict(json_schema_extra=_require_content_or_calls)

    role: Text
    """system, user, assistant, or what the model's chat template knows."""
    content: Annotated[
        str | Annotated[list[ContentPart], FirstOnly()] | None,
        must_be('text, or a list of parts like {"type": "text", "text": "…"}'),
    ] = None
    """Text; the texts of several parts are joined by line breaks. An assistant that called tools may leave it out."""
    name: str | None = None
    """The speaker's name, where the template uses it."""
    tool_calls: Annotated[list[ToolCallPart], FirstOnly(), MaxLen(MAX_TOOLS)] | None = None
    """Calls that the assistant made in this turn."""
    tool_call_id: str | None = None
    """The call that a message of role tool answers."""
    reasoning_content: str | None = None
    """The text that the assistant thought in this turn, where the template uses it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""

    audio: Any = not_served()
    function_call: Any = not_served()
    # What the `message` of an answer carries, so that it can be sent back as it came.
    annotations: Any = ignored()
    refusal: Any = ignored()
    # What other servers and libraries add to it.
    cache_control: Any = ignored()
    id: Any = ignored()
    provider_specific_fields: Any = ignored()
    reasoning_details: Any = ignored()
    thinking_blocks: Any = ignored()


class Function(JsonObject):
    """A function that the model may call."""

    model_config = document_as("name")

    name: Annotated[str, schema(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    """Tells the model what it does."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments. Null: it has none."""
    strict: bool | None = None
    """Each call is held to the whole schema, which is refused if that cannot be. Otherwise only calls that tool_choice
    demands, or that stand beside a form, are held to it, as far as it can be. Null: false."""


class Tool(JsonObject):
    """A tool; `function` is the only type served."""

    model_config = document_as("type", "function")

    type: Literal["function"]
    function: Function
    cache_control: Any = ignored()


class FunctionName(JsonObject):
    """A function by its name."""

    model_config = document_as("name")

    name: Name


class NamedTool(JsonObject):
    """A tool that the model has to call."""

    model_config = document_as("type", "function")

    type: Literal["function"]
    function: FunctionName
