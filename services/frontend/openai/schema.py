"""Bodies of requests: OpenAI's fields, the sampling fields beyond them, and fields that are not served yet.

Types are checked here, ranges in `triptych_services.frontend.requests.parse`. Everything optional may also be null. The sampling
fields that all endpoints share are made from the table in `triptych.types.sampling`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, MaxLen
from pydantic import (
    ConfigDict,
    Field,
    create_model,
)

from triptych.types.output_limits import MAX_REPETITION
from triptych.types.sampling import MAX_LOGPROB_TOKEN_IDS, SAMPLING_FIELDS, FieldKind, SamplingField
from triptych_services.frontend.openai.conversation import Message, NamedTool, Tool
from triptych_services.frontend.openai.fields import (
    FirstOnly,
    Integral,
    Text,
    TokenIds,
    document_as,
    exactly_one_of,
    limits,
    schema,
)
from triptych_services.frontend.openai.request_body import Body, Part, either, ignored, not_served
from triptych_services.frontend.requests.parse import MAX_LABEL_BYTES, MAX_REQUEST_ID_BYTES
from triptych_services.frontend.requests.raw import MAX_ABORTS, MAX_MESSAGES
from triptych_services.frontend.requests.tools import MAX_TOOLS

_LOGIT_BIAS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number"},
}
_CHECKPOINTS_DEFAULT = "the model's own default, else "
TemplateVariables = Annotated[dict[str, Any], schema(propertyNames={"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_PROMPTS = 1024  # of one request; each becomes a request of its own
MAX_DOCUMENTS = 1024
_LEAST_SEED = -(1 << 63)


class RepetitionDetectionBody(Part):
    """A repetition that ends the output, as vLLM's clients describe it."""

    max_pattern_size: Annotated[int, Integral, schema(minimum=1, maximum=MAX_REPETITION)]
    """Tokens of the longest pattern that is looked for."""
    min_count: Annotated[int, Integral, schema(minimum=2, maximum=MAX_REPETITION)]
    """How often the pattern must follow itself."""
    min_pattern_size: Annotated[int, Integral, schema(minimum=0, maximum=MAX_REPETITION)] = 0
    """Tokens of the shortest pattern, at most max_pattern_size; 0: 1."""


def _annotation(name: str, spec: SamplingField) -> Any:
    """Return the type of a sampling field in a body."""
    match spec.kind:
        case FieldKind.INTEGER | FieldKind.THINKING:
            return Annotated[int, Integral, limits(name)] | None
        case FieldKind.NUMBER:
            return Annotated[float, limits(name)] | None
        case FieldKind.BOOLEAN:
            return bool | None
        case FieldKind.TOKEN_IDS:
            return Annotated[TokenIds, schema(minItems=spec.min_items or None)] | None
        case FieldKind.BIASES:
            return Annotated[dict[str, Any], schema(**_LOGIT_BIAS)] | None
        case FieldKind.STRINGS | FieldKind.WORDS:
            text = Annotated[str, schema(minLength=1, maxLength=spec.max_chars)]
            texts = Annotated[list[text], FirstOnly(), schema(maxItems=spec.max_items)]
            return Annotated[text | texts | None, either("a string or a list of strings")]
        case FieldKind.REPETITION:
            return RepetitionDetectionBody | None
    raise AssertionError(f"{name}: fields of kind {spec.kind.name} cannot be in a body")


def _description(spec: SamplingField) -> str:
    """Return the field's meaning and what null means."""
    if spec.default is None:
        return spec.help.replace("None", "Null")
    if spec.kind not in (FieldKind.INTEGER, FieldKind.NUMBER, FieldKind.BOOLEAN):
        return spec.help
    default = json.dumps(spec.default) if spec.kind is FieldKind.BOOLEAN else f"{spec.default:g}"
    return f"{spec.help} Null: {_CHECKPOINTS_DEFAULT if spec.may_come_from_checkpoint else ''}{default}."


def _definition(name: str, spec: SamplingField) -> tuple[Any, Any]:
    return _annotation(name, spec), Field(default=None, description=_description(spec))


COMMON_SAMPLING_FIELDS = tuple(name for name, spec in SAMPLING_FIELDS.items() if spec.is_common)
"""Sampling fields that each body has under the same name."""

if TYPE_CHECKING:
    SamplingFields = Body
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{name: _definition(name, SAMPLING_FIELDS[name]) for name in COMMON_SAMPLING_FIELDS},
    )


class StreamOptions(Part):
    """How a stream reports the token counts."""

    include_usage: bool | None = None
    """One more chunk before the end, with no choices and the token counts."""
    continuous_usage_stats: bool | None = None
    """The counts so far in every chunk. Only with `include_usage`."""
    include_event_ids: bool | None = None
    """Each event has an `id:`, by which the stream goes on if it breaks (Last-Event-ID). Of one prompt and at most 32
    choices."""
    include_obfuscation: Any = ignored()


class JsonSchemaFormat(Part):
    """A JSON schema, as OpenAI's clients send it."""

    model_config = Part.model_config | document_as("schema")

    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema."""
    strict: bool | None = None
    """False: what cannot be enforced is left out, and named by the header X-Not-Enforced. Null: true, it is refused."""


class ResponseFormat(Part):
    """The form of the answer in OpenAI's words."""

    model_config = Part.model_config | document_as("type")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """Only for the type json_schema."""


class StructuredOutputsBody(Part):
    """Exactly one form of the answer, and how its JSON is written. vLLM has the same object."""

    model_config = ConfigDict(
        json_schema_extra=exactly_one_of(
            "json", "regex", "choice", "grammar", "json_object", "structural_tag"
        )
    )

    json_: Annotated[
        dict[str, Any] | str | None, Field(alias="json"), either("a JSON schema: an object, or its text")
    ] = None
    """A JSON schema: an object, or its text."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: Annotated[list[Text], FirstOnly(), schema(minItems=1)] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar: llguidance's variant of Lark if it has a rule `start`, else GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool | None = None
    """False: JSON may have white space between its tokens, any amount of it. Null: true."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON."""

    disable_additional_properties: Any = not_served(False)
    structural_tag: Annotated[
        dict[str, Any] | str | None, either("a structural tag: an object, or its text")
    ] = None
    """Free text with sections of JSON that begin with certain texts."""


class GenerationBody(SamplingFields):
    """Fields that all requests to generate have in common, whatever API they are of."""

    model: str | None = None
    """Name of the model; null: the one served."""
    seed: (
        Annotated[int, Integral, Ge(_LEAST_SEED), schema(minimum=_LEAST_SEED, maximum=(1 << 64) - 1)] | None
    ) = None
    """The same seed gives the same output. Null and -1: one is drawn."""
    truncate_prompt_tokens: Annotated[int, Integral, schema(anyOf=[{"const": -1}, {"minimum": 1}])] | None = (
        None
    )
    """Keep only so many tokens of the prompt, -1: as many as the context has room for beside the output. Null: refuse
    what is too long."""
    truncation_side: Literal["left", "right"] | None = None
    """The side on which truncate_prompt_tokens cuts. Null: left."""
    add_special_tokens: bool | None = None
    """Begin and end the prompt as the model's prompts do. Null: true for a text, false for a conversation, whose
    template writes its own."""
    request_id: Annotated[str, schema(pattern=f"^[ -~]{{1,{MAX_REQUEST_ID_BYTES}}}$")] | None = None
    """Name of the request in logs. Null: the X-Request-Id."""
    priority: Annotated[int, Integral, schema(minimum=-(1 << 31), maximum=(1 << 31) - 1)] | None = None
    """Lower runs first. Null: 0."""
    tenant: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Tenant, at most 256 bytes: tenants get fair shares. Without API keys it is not verified; with one, the
    key decides. Null: `user`."""
    user: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """OpenAI's name of the end user, at most 256 bytes: the tenant where none is given."""
    cache_salt: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Prefixes are shared only between requests of equal salt."""
    stream: bool | None = None
    """Send the output as server-sent events while it grows."""
    structured_outputs: StructuredOutputsBody | None = None
    """Force the answer into a form. Null: free text."""

    chat_template: Any = not_served()
    guided_choice: Any = not_served()
    guided_grammar: Any = not_served()
    guided_json: Any = not_served()
    guided_regex: Any = not_served()
    kv_transfer_params: Any = not_served()
    length_penalty: Any = not_served(1, 1.0)
    mm_processor_kwargs: Any = not_served()
    stream_interval: Any = not_served(1)
    use_beam_search: Any = not_served(False)
    vllm_xargs: Any = not_served()
    session_id: Any = ignored()
    prompt_cache_key: Any = ignored()
    prompt_cache_retention: Any = ignored()
    safety_identifier: Any = ignored()
    service_tier: Any = ignored()
    store: Any = ignored()


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
        either(
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

    messages: Annotated[list[Message], MaxLen(MAX_MESSAGES), schema(minItems=1)] | None = None
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
        either('"auto", "none", "required", or {"type": "function", "function": {"name": "…"}}'),
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


class AbortRequest(Body):
    """POST /abort_requests."""

    model_config = document_as("request_ids")

    request_ids: Annotated[list[str], FirstOnly(), MaxLen(MAX_ABORTS), schema(minItems=1)] | None = None
    """X-Request-Ids of requests, `request_id`s that they were sent with, or ids of their answers. One that several
    requests share ends all of them."""
