"""Answers of Anthropic's Messages API as /openapi.json describes them. `objects` writes their JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triptych_services.frontend.http.answers import Answer


class TextContent(Answer):
    """A text of the model."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    """The thoughts of the model before it went on."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseContent(Answer):
    """A call of a tool that the model makes."""

    type: Literal["tool_use"]
    id: str
    """For the block of type tool_result that has its result."""
    name: str
    input: dict[str, Any]
    """The arguments. Those that are no JSON object are a text in the field INVALID_JSON."""


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TokensDetails(Answer):
    thinking_tokens: int
    """Tokens that the model thought before it answered."""


class MessageUsage(Answer):
    """Counts in tokens."""

    input_tokens: int
    """Those of the prompt that were not found in the prefix cache."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Those that were. They are known at the end of a stream."""
    output_tokens: int
    output_tokens_details: TokensDetails


class MessageAnswer(Answer):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    """Null at the beginning of a stream; max_tokens also where the request was aborted, or the output repeated
    itself."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    usage: MessageUsage


class TokensCountAnswer(Answer):
    input_tokens: int


class MessageStart(Answer):
    """The beginning of a stream."""

    type: Literal["message_start"]
    message: MessageAnswer


class Ping(Answer):
    """Nothing new."""

    type: Literal["ping"]


class ContentBlockStart(Answer):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    """Which block, 0, 1, …"""
    content_block: Content


class TextDelta(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Answer):
    type: Literal["input_json_delta"]
    partial_json: str
    """More of the arguments' JSON text."""


class ContentBlockDelta(Answer):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(Answer):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer):
    """The end of the message."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    """The counts of the whole message."""


class MessageStop(Answer):
    """The end of a stream."""

    type: Literal["message_stop"]


class AnthropicErrorFields(Answer):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    message: str
    """For people: names field, value and limit, everything that is wrong at once."""


class AnthropicError(Answer):
    """Any answer that is not 2xx, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


MESSAGES_EVENTS: tuple[type[Answer], ...] = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    AnthropicError,
)
"""Every event that a stream may have."""
