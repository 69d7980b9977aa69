"""Answers of POST /v1/responses as /openapi.json describes them. `objects` writes their JSON without building them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triptych_services.frontend.http.answers import Answer
from triptych_services.frontend.http.openai.answers import ChatToken

Status = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    """Always empty."""
    logprobs: list[ChatToken]
    """One entry per token, those of the reasoning included; empty unless asked for."""


class ReasoningTextPart(Answer):
    """The text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """A text of the model."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputTextPart]
    """One; none while it has only begun."""


class ReasoningItem(Answer):
    """The thoughts of the model before it went on."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[None]
    """Always empty."""
    content: list[ReasoningTextPart]
    """One; none while it has only begun."""


class FunctionCallItem(Answer):
    """A call that the model makes."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    """For the item of type function_call_output that has its result."""
    name: str
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""
    arguments: str
    """JSON text, as the model wrote it."""


OutputItem = Annotated[MessageItem | ReasoningItem | FunctionCallItem, Field(discriminator="type")]


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Answer):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class InputTokensDetails(Answer):
    cached_tokens: int
    """Found in the prefix cache."""
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int
    """Tokens that the model thought before it answered."""


class ResponseUsage(Answer):
    """Counts in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Answer):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    """Why it failed; only in the last event of a stream."""
    incomplete_details: IncompleteDetails | None
    """Null also where the request was aborted, or the output repeated itself."""
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    """Null until the end."""

    # repeated from the request
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    """Nothing is stored."""
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponsesEvent(Answer):
    """One event of a stream."""

    sequence_number: int
    """0, 1, …"""


class LifecycleEvent(ResponsesEvent):
    """The response as it stands."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class OutputItemEvent(ResponsesEvent):
    """An item begins or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(ResponsesEvent):
    """An event inside of an item."""

    item_id: str
    output_index: int


class ContentPartEvent(ItemEvent):
    """A part of an item begins or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputTextPart | ReasoningTextPart, Field(discriminator="type")]


class OutputTextDelta(ItemEvent):
    """New text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatToken]


class OutputTextDone(ItemEvent):
    """The whole text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatToken]


class ReasoningTextDelta(ItemEvent):
    """New text of a reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(ItemEvent):
    """The whole text of a reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(ItemEvent):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(ItemEvent):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


RESPONSES_EVENTS: tuple[type[ResponsesEvent], ...] = (
    LifecycleEvent,
    OutputItemEvent,
    ContentPartEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ArgumentsDelta,
    ArgumentsDone,
)
"""Every event that a stream may have."""
