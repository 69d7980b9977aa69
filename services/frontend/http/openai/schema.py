"""Bodies of requests: OpenAI's fields, the sampling fields beyond them, and fields that are not served yet.

Types are checked here, ranges in `triptych_services.frontend.requests.parse`. Everything optional may also be null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import ConfigDict, Field

from triptych.types.sampling import MAX_LOGPROB_TOKEN_IDS
from triptych_services.frontend.http.body import Body, JsonObject, ignored, must_be, not_served
from triptych_services.frontend.http.fields import (
    FirstOnly,
    Integral,
    Text,
    TokenIds,
    document_as,
    exactly_one_of,
    limits,
    schema,
)
from triptych_services.frontend.http.generation_body import GenerationBody, TemplateVariables
from triptych_services.frontend.http.openai.conversation import Message, NamedTool, Tool
from triptych_services.frontend.requests.raw import MAX_DOCUMENTS, MAX_MESSAGES
from triptych_services.frontend.requests.tools import MAX_TOOLS

MAX_PROMPTS = 1024  # of one request; each becomes a request of its own
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(JsonObject):
    """How a stream reports the token counts."""

    include_usage: bool | None = None
    """One more chunk before the end, with no choices and the token counts."""
    continuous_usage_stats: bool | None = None
    """The counts so far in every chunk. Only with `include_usage`."""
    include_event_ids: bool | None = None
    """Each event has an `id:`, by which the stream goes on if it breaks (Last-Event-ID). Of one prompt and at most 32
    choices."""
    include_obfuscation: Any = ignored()


class JsonSchemaFormat(JsonObject):
    """A JSON schema, as OpenAI's clients send it."""

    model_config = JsonObject.model_config | document_as("schema")

    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema."""
    strict: bool | None = None
    """False: what cannot be enforced is left out, and named by the header X-Not-Enforced. Null: true, it is refused."""


class ResponseFormat(JsonObject):
    """The form of the answer in OpenAI's words."""

    model_config = JsonObject.model_config | document_as("type")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """Only for the type json_schema."""


class SamplingBody(GenerationBody):
    """Fields that completions and chat completions have in common."""

    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    prompt_logprobs: Annotated[int, Integral, limits("prompt_logprobs")] | None = None
    """Report, for each token of the prompt, its log-probability and those of so many best tokens, 0..20. Only in whole
    answers. Null: none."""
    logprob_token_ids: Annotated[TokenIds, schema(maxItems=MAX_LOGPROB_TOKEN_IDS)] | None = None
    """Report the log-probabilities of these tokens, in place of those of the best rivals. Null: of none."""
    return_token_ids: bool | None = None
    """Send the token ids of prompt and output as well."""
    return_tokens_as_token_ids: bool | None = None
    """Name the tokens in `logprobs` by their ids: `token_id:123`."""
    response_format: ResponseFormat | None = None
    """Force the answer into a form, as structured_outputs does; at most one of the two. Null: free text."""
    no_stop_trim: Any = not_served(False)
    return_hidden_states: Any = not_served(False)
    metadata: Any = ignored()


_PromptIds = Annotated[TokenIds, schema(minItems=1)]
Prompt = (
    Text
    | Annotated[list[Text], FirstOnly(), MaxLen(MAX_PROMPTS), schema(minItems=1)]
    | _PromptIds
    | Annotated[list[_PromptIds], FirstOnly(), MaxLen(MAX_PROMPTS), schema(minItems=1)]
)


class CompletionRequest(SamplingBody):
    """POST /v1/completions."""

    model_config = document_as("prompt")

    prompt: Annotated[
        Prompt | None,
        must_be(
            "a string, a list of token ids, or a list of strings or of lists of token ids, "
            f"at most {MAX_PROMPTS} of them"
        ),
    ] = None
    """At least one token each. Choice j of prompt i has the index i * n + j."""
    max_tokens: Annotated[int, Integral, limits("max_tokens")] | None = None
    """New tokens at most, >= 1, or 0 with echo or prompt_logprobs. Null: 16."""
    echo: bool | None = None
    """Repeat the prompt at the head of the text."""
    logprobs: Annotated[int, Integral, limits("logprobs")] | None = None
    """Report the log-probability of each token and of its so many best rivals, 0..20; with echo the prompt's as well.
    Null: none."""

    best_of: Annotated[int, Integral, schema(const=1)] | None = None
    """Not served, but as 1, and as n, which JSON Schema cannot say: of so many choices none is left out."""
    suffix: Any = not_served("")


class ChatFields(Body):
    """A conversation, and how it becomes a prompt."""

    messages: Annotated[list[Message], FirstOnly(), MaxLen(MAX_MESSAGES), schema(minItems=1)] | None = None
    """The conversation so far, at least one message."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn. Null: true, unless continue_final_message is."""
    continue_final_message: bool | None = None
    """Go on with the last message; open no turn."""
    documents: Annotated[list[dict[str, Any]], FirstOnly(), MaxLen(MAX_DOCUMENTS)] | None = None
    """Texts that the answer may draw on, for chat templates that read them: objects with `title` and `text`."""
    chat_template_kwargs: TemplateVariables | None = None
    """Extra variables for the model's chat template."""
    tools: Annotated[list[Tool], FirstOnly(), MaxLen(MAX_TOOLS)] | None = None
    """Tools that the model may call."""
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool | None,
        must_be('"auto", "none", "required", or {"type": "function", "function": {"name": "…"}}'),
    ] = None
    """Whether the model may call tools, must, or which one. Null: it may."""


class ChatCompletionRequest(SamplingBody, ChatFields):
    """POST /v1/chat/completions."""

    model_config = document_as("messages")

    max_completion_tokens: Annotated[int, Integral, limits("max_tokens", minimum=1)] | None = None
    """New tokens at most, >= 1. Null: all that the context leaves."""
    max_tokens: Annotated[int, Integral, limits("max_tokens", minimum=1)] | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Annotated[int, Integral, limits("logprobs")] | None = None
    """And those of its so many best rivals, 0..20."""
    parallel_tool_calls: bool | None = None
    """The answer may hold several calls; without it, those after the first are left out. Null: true."""
    reasoning_effort: ReasoningEffort | None = None
    """How long the model thinks, for chat templates that read it; xhigh and max are high to them. none also sets their
    `enable_thinking` to false."""
    include_reasoning: bool | None = None
    """Send what the model thinks, as reasoning_content. Null: true."""

    audio: Any = not_served()
    function_call: Any = not_served("none")
    functions: Any = not_served([])
    modalities: Any = not_served(["text"])
    moderation: Any = not_served()
    prediction: Any = ignored()
    prompt_cache_options: Any = ignored()
    verbosity: Any = ignored()
    separate_reasoning: Any = not_served(True)
    stream_reasoning: Any = not_served(True)
    web_search_options: Any = not_served()


class TokenizeRequest(ChatFields):
    """POST /tokenize: either `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("prompt", "messages"))

    model: str | None = None
    """Name of the model; null: the one served."""
    prompt: str | None = None
    """Plain text."""
    add_special_tokens: bool | None = None
    """Begin and end as the model's prompts do. Null: true for a prompt; a chat template brings its own."""
    return_token_strs: bool | None = None
    """Send the tokens as the vocabulary spells them as well."""


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model_config = document_as("tokens")

    model: str | None = None
    """Name of the model; null: the one served."""
    tokens: TokenIds | None = None
    """Token ids."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Null: true."""
