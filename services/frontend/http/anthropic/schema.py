"""Bodies of Anthropic's Messages API: its fields, the sampling fields beyond them, and fields that are not served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from triptych.types.sampling import SAMPLING_FIELDS
from triptych_services.frontend.http.body import Body, JsonObject, Unserved, ignored, not_served
from triptych_services.frontend.http.fields import (
    FirstOnly,
    Integral,
    Name,
    by_kind,
    document_as,
    kind,
    limits,
    schema,
)
from triptych_services.frontend.http.generation_body import GenerationBody, TemplateVariables
from triptych_services.frontend.requests.parse import MAX_LABEL_BYTES
from triptych_services.frontend.requests.raw import MAX_MESSAGES
from triptych_services.frontend.requests.tools import MAX_TOOLS

_STOP = SAMPLING_FIELDS["stop"]
_Other = Annotated[SkipJsonSchema[Unserved], kind("other")]
_A_BLOCK = "a block with a type"
_BLOCKS = 'text, or a list of blocks like {"type": "text", "text": "…"}'


class TextBlock(JsonObject):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: Any = ignored()
    citations: Any = ignored()
    parsed_output: Any = ignored()


class ThinkingBlock(JsonObject):
    """The thoughts of the model in a turn, as an answer has brought them."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = ignored()


class RedactedThinkingBlock(JsonObject):
    """Thoughts that only their author can read; the model is not shown them."""

    type: Literal["redacted_thinking"]
    data: Any = ignored()


class ToolUseBlock(JsonObject):
    """A call of a tool that the model made."""

    type: Literal["tool_use"]
    id: Name
    """Referred to by the block that has its result."""
    name: Name
    input: dict[str, Any]
    """The arguments."""
    cache_control: Any = ignored()
    caller: Any = ignored()
    toolset_name: Any = ignored()


_TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, kind("text_block")] | _Other, by_kind(_A_BLOCK, text="text_block")]],
    FirstOnly(),
    kind("list"),
]


class ToolResultBlock(JsonObject):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[Annotated[str, kind("text")] | _TextBlocks, by_kind(_BLOCKS)] | None = None
    """Text; the texts of several blocks are joined by line breaks. Null: nothing."""
    is_error: bool | None = None
    """Accepted. What went wrong is what the content says."""
    cache_control: Any = ignored()
    toolset_name: Any = ignored()


class UserTurn(JsonObject):
    """A turn of the user: results of calls, and text."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, kind("text")]
        | Annotated[
            list[
                Annotated[
                    Annotated[TextBlock, kind("text_block")]
                    | Annotated[ToolResultBlock, kind("tool_result")]
                    | _Other,
                    by_kind(_A_BLOCK, "tool_result", text="text_block"),
                ]
            ],
            FirstOnly(),
            MinLen(1),
            kind("list"),
        ],
        by_kind(_BLOCKS),
    ]


class AssistantTurn(JsonObject):
    """A turn of the model. If it is the last, the model goes on with it."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, kind("text")]
        | Annotated[
            list[
                Annotated[
                    Annotated[TextBlock, kind("text_block")]
                    | Annotated[ThinkingBlock, kind("thinking")]
                    | Annotated[RedactedThinkingBlock, kind("redacted_thinking")]
                    | Annotated[ToolUseBlock, kind("tool_use")]
                    | _Other,
                    by_kind(_A_BLOCK, "thinking", "redacted_thinking", "tool_use", text="text_block"),
                ]
            ],
            FirstOnly(),
            MinLen(1),
            kind("list"),
        ],
        by_kind(_BLOCKS),
    ]


class SystemTurn(JsonObject):
    """Instructions in the middle of a conversation, for chat templates that take them there."""

    role: Literal["system"]
    content: Annotated[Annotated[str, kind("text")] | _TextBlocks, by_kind(_BLOCKS)]


_Turn = Annotated[
    Annotated[UserTurn, kind("user")]
    | Annotated[AssistantTurn, kind("assistant")]
    | Annotated[SystemTurn, kind("system")],
    by_kind("an object with a role: user, assistant or system", "user", "assistant", "system", key="role"),
]


class ClientTool(JsonObject):
    """A tool that the model may call, and the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, schema(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    input_schema: dict[str, Any]
    """JSON schema of its arguments."""
    description: str | None = None
    """Tells the model what it does."""
    allowed_callers: Any = ignored()
    cache_control: Any = ignored()
    defer_loading: Any = ignored()
    eager_input_streaming: Any = ignored()
    input_examples: Any = ignored()
    strict: bool | None = None
    """Each call is held to the whole schema, which is refused if that cannot be. Null: false."""


class ToolByName(JsonObject):
    """A tool that the model has to call."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None
    """Accepted: it is one call anyway."""


class ToolMode(JsonObject):
    """Whether the model may call tools (auto), must (any), or must not (none)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None
    """Calls after the first are left out. Null: all are sent."""


class Thinking(JsonObject):
    """Whether the model thinks before it answers, for chat templates that can turn it on and off."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """enabled and disabled set the template's `enable_thinking`; the others leave it as it is."""
    budget_tokens: Any = ignored()
    display: Literal["summarized", "omitted"] | None = None
    """omitted: what the model thinks is not sent. It is never summarized."""


class JsonFormat(JsonObject):
    """The form of the answer: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(JsonObject):
    """How the model answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How long it thinks, for chat templates that read it; xhigh and max are high to them."""
    format: JsonFormat | None = None
    """Null: free text."""
    task_budget: Any = not_served()


class MessagesFields(Body):
    """A conversation as Anthropic's clients send it."""

    messages: Annotated[list[_Turn], FirstOnly(), MaxLen(MAX_MESSAGES), schema(minItems=1)] | None = None
    """The conversation so far, at least one turn."""
    system: Annotated[Annotated[str, kind("text")] | _TextBlocks, by_kind(_BLOCKS)] | None = None
    """Stands before the conversation."""
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[ClientTool, kind("custom")] | _Other,
                    by_kind("a tool with a name and an input_schema", "custom", default="custom"),
                ]
            ],
            FirstOnly(),
            MaxLen(MAX_TOOLS),
        ]
        | None
    ) = None
    """Tools that the model may call."""
    tool_choice: (
        Annotated[
            Annotated[ToolByName, kind("tool")] | Annotated[ToolMode, kind("other")],
            by_kind('an object like {"type": "auto"}', "tool"),
        ]
        | None
    ) = None
    """Whether the model may call tools, must, or which one. Null: it may."""
    thinking: Thinking | None = None
    """Null: as the chat template has it."""
    output_config: OutputConfig | None = None
    """How the model answers."""
    chat_template_kwargs: TemplateVariables | None = None
    """Extra variables for the model's chat template."""

    container: Any = not_served()
    mcp_servers: Any = not_served([])
    output_format: Any = not_served()
    speed: Any = not_served("standard")
    anthropic_beta: Any = ignored()
    anthropic_version: Any = ignored()
    betas: Any = ignored()
    cache_control: Any = ignored()
    context_management: Any = ignored()
    diagnostics: Any = ignored()
    inference_geo: Any = ignored()
    user_profile_id: Any = ignored()
    workspace_id: Any = ignored()


class Metadata(JsonObject):
    """The user that a request is for."""

    user_id: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """The end user, at most 256 bytes: the tenant where none is given."""


class MessagesRequest(GenerationBody, MessagesFields):
    """POST /v1/messages."""

    model_config = document_as("messages", "max_tokens")

    max_tokens: Annotated[int, Integral, limits("max_tokens", minimum=1)] | None = None
    """New tokens at most, >= 1, those of the thinking included."""
    stop_sequences: (
        Annotated[
            list[Annotated[str, schema(minLength=1, maxLength=_STOP.max_chars)]],
            FirstOnly(),
            schema(maxItems=_STOP.max_items),
        ]
        | None
    ) = None
    """Texts that end the output."""
    metadata: Metadata | None = None
    """The user that the request is for."""

    n: Any = not_served(1)
    stop: Any = not_served([])


class CountTokensRequest(MessagesFields):
    """POST /v1/messages/count_tokens."""

    model_config = document_as("messages")

    model: str | None = None
    """Name of the model; null: the one served."""
