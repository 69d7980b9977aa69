"""Bodies of POST /v1/responses: OpenAI's fields, the sampling fields beyond them, and fields that are not served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from triptych_services.frontend.http.body import JsonObject, Unserved, ignored, not_served
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
from triptych_services.frontend.http.openai.conversation import Function
from triptych_services.frontend.http.openai.schema import ReasoningEffort
from triptych_services.frontend.requests.raw import MAX_MESSAGES
from triptych_services.frontend.requests.tools import MAX_TOOLS

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
_Other = Annotated[SkipJsonSchema[Unserved], kind("other")]


class InputText(JsonObject):
    """A piece of text that is sent to the model."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = ignored()


class OutputText(JsonObject):
    """A piece of text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: Any = ignored()
    logprobs: Any = ignored()
    parsed: Any = ignored()


class Refusal(JsonObject):
    """A refusal of the model; to the model it is text like other text."""

    type: Literal["refusal"]
    refusal: str


_Content = Annotated[
    Annotated[InputText, kind("input_text")]
    | Annotated[OutputText, kind("output_text")]
    | Annotated[Refusal, kind("refusal")]
    | _Other,
    by_kind("a part with a type", "input_text", "output_text", "refusal"),
]


class InputMessage(JsonObject):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """developer is another name of system."""
    content: Annotated[
        Annotated[str, kind("text")] | Annotated[list[_Content], FirstOnly(), kind("list")],
        by_kind('text, or a list of parts like {"type": "input_text", "text": "…"}'),
    ]
    """Text; the texts of several parts are joined by line breaks."""
    id: Any = ignored()
    phase: Any = ignored()
    status: Any = ignored()


class InputFunctionCall(JsonObject):
    """A call of a tool that the model made."""

    type: Literal["function_call"]
    call_id: Name
    """Referred to by the item that has its result."""
    name: Name
    arguments: str
    """JSON text."""
    async_: Any = ignored()  # how the official client's `model_dump` spells the next one
    is_async: Any = ignored("async")
    caller: Any = ignored()
    id: Any = ignored()
    namespace: Any = ignored()
    parsed_arguments: Any = ignored()
    status: Any = ignored()


_OutputPart = Annotated[
    Annotated[InputText, kind("input_text")] | _Other, by_kind("a part with a type", "input_text")
]


class InputFunctionCallOutput(JsonObject):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[
        Annotated[str, kind("text")] | Annotated[list[_OutputPart], FirstOnly(), kind("list")],
        by_kind('text, or a list of parts like {"type": "input_text", "text": "…"}'),
    ]
    """Text; the texts of several parts are joined by line breaks."""
    caller: Any = ignored()
    id: Any = ignored()
    name: Any = ignored()
    namespace: Any = ignored()
    status: Any = ignored()


class SummaryText(JsonObject):
    type: Literal["summary_text"]
    text: str


class ReasoningText(JsonObject):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(JsonObject):
    """The thoughts of the model in a turn, as an answer has brought them."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FirstOnly()] | None = None
    summary: Annotated[list[SummaryText], FirstOnly()] | None = None
    """Used where there is no content."""
    encrypted_content: Any = ignored()
    id: Any = ignored()
    status: Any = ignored()


_Item = Annotated[
    Annotated[InputMessage, kind("message")]
    | Annotated[InputFunctionCall, kind("function_call")]
    | Annotated[InputFunctionCallOutput, kind("function_call_output")]
    | Annotated[InputReasoning, kind("reasoning")]
    | _Other,
    by_kind(
        "an item with a type",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        default="message",
    ),
]
ResponsesInput = Annotated[
    Annotated[str, kind("text")]
    | Annotated[list[_Item], FirstOnly(), MaxLen(MAX_MESSAGES), schema(minItems=1), kind("list")],
    by_kind("text, or a list of items"),
]


class FunctionTool(Function):
    """A function that the model may call."""

    model_config = document_as("type", "name")

    type: Literal["function"]
    allowed_callers: Any = ignored()
    cache_control: Any = ignored()
    defer_loading: Any = ignored()
    output_schema: Any = ignored()


class NamespaceTool(JsonObject):
    """Functions that belong together. A call of one has the `namespace`; the model sees all functions side by side."""

    type: Literal["namespace"]
    name: Name
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, kind("function")] | _Other, by_kind("a tool with a type", "function")
            ]
        ],
        FirstOnly(),
    ]
    description: str | None = None
    """Repeated in the answer."""


class NamedFunction(JsonObject):
    """A tool that the model has to call."""

    type: Literal["function"]
    name: Name


class ReasoningOptions(JsonObject):
    """How the model thinks before it answers. It is sent whole, never summarized."""

    effort: ReasoningEffort | None = None
    """How long it thinks, for chat templates that read it; xhigh and max are high to them. none also sets their
    `enable_thinking` to false."""
    context: Any = ignored()
    generate_summary: Any = ignored()
    summary: Any = ignored()


class TextFormat(JsonObject):
    """The form of the answer."""

    model_config = document_as("type")

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The JSON schema; only for the type json_schema."""
    name: str | None = None
    """Repeated in the answer."""
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """False: what cannot be enforced is left out, and named by the header X-Not-Enforced. Null: true, it is refused."""


class TextOptions(JsonObject):
    """How the answer is written."""

    format: TextFormat | None = None
    """Null: free text."""
    verbosity: Any = ignored()


class ResponsesStreamOptions(JsonObject):
    """How a stream is sent."""

    include_obfuscation: Any = ignored()


class ResponsesRequest(GenerationBody):
    """POST /v1/responses."""

    model_config = document_as("input")

    input: ResponsesInput | None = None
    """The conversation so far: a text of the user, or at least one item."""
    instructions: str | None = None
    """Stands before the conversation, as a system message."""
    max_output_tokens: Annotated[int, Integral, limits("max_tokens", minimum=1)] | None = None
    """New tokens at most, >= 1, those of the reasoning included. Null: all that the context leaves."""
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[FunctionTool, kind("function")]
                    | Annotated[NamespaceTool, kind("namespace")]
                    | _Other,
                    by_kind("a tool with a type", "function", "namespace"),
                ]
            ],
            FirstOnly(),
            MaxLen(MAX_TOOLS),
        ]
        | None
    ) = None
    """Tools that the model may call: functions, alone or in namespaces."""
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], kind("text")]
            | Annotated[NamedFunction, kind("function")]
            | _Other,
            by_kind('"auto", "none", "required", or {"type": "function", "name": "…"}', "function"),
        ]
        | None
    ) = None
    """Whether the model may call tools, must, or which one. Null: it may."""
    parallel_tool_calls: bool | None = None
    """The answer may hold several calls; without it, those after the first are left out. Null: true."""
    reasoning: ReasoningOptions | None = None
    """How the model thinks before it answers."""
    text: TextOptions | None = None
    """The form of the answer. Null: free text."""
    top_logprobs: Annotated[int, Integral, limits("logprobs")] | None = None
    """Report the log-probability of each token and those of its so many best rivals, 0..20. Not beside tools."""
    include: Annotated[list[str], FirstOnly()] | None = None
    """`message.output_text.logprobs` reports the log-probability of each token. Other entries name what is in an
    answer anyway, or what no answer has."""
    metadata: Annotated[dict[str, str], schema(maxProperties=MAX_METADATA)] | None = None
    """At most 16 texts by name, which the answer repeats."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: a conversation that is too long loses its beginning, as by truncate_prompt_tokens -1. Null: it is
    refused."""
    stream_options: ResponsesStreamOptions | None = None
    """Only with `stream`."""
    chat_template_kwargs: TemplateVariables | None = None
    """Extra variables for the model's chat template."""
    include_reasoning: bool | None = None
    """Send what the model thinks, as items of type reasoning. Null: true."""

    background: Any = not_served(False)
    context_management: Any = not_served([])
    conversation: Any = not_served()
    moderation: Any = not_served()
    n: Any = not_served(1)
    previous_response_id: Any = not_served()
    prompt: Any = not_served()
    client_metadata: Any = ignored()
    max_tool_calls: Any = ignored()
    prompt_cache_options: Any = ignored()
