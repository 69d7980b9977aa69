"""Bodies of requests: OpenAI's fields, the sampling fields beyond them, and fields that are not served yet.

Types are checked here, ranges in `services.frontend.requests.parse`. Everything optional may also be null. The sampling
fields that all endpoints share are made from the table in `triptych.types.sampling`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MaxLen
from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from services.frontend.openai.request_body import Body, Part, either, ignored, not_served
from services.frontend.requests.parse import MAX_LABEL_BYTES
from services.frontend.requests.raw import MAX_MESSAGES
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingField

_LOGIT_BIAS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number"},
}
_CHECKPOINTS_DEFAULT = "the model's own default, else "
_VARIABLE: dict[str, Any] = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
MAX_PROMPTS = 1024  # of one request; each becomes a request of its own


class FirstOnly(FailFast):
    """A list stops at its first wrong entry: a million wrong ones must not become a million errors."""

    __hash__ = object.__hash__  # pydantic's own has none, and unions of types need one


def schema(**keywords: Any) -> FieldInfo:
    """Return keywords of JSON Schema that describe in the document what the parser checks."""
    return Field(json_schema_extra={name: value for name, value in keywords.items() if value is not None})


def limits(name: str, *, minimum: int | None = None) -> FieldInfo:
    """Return the range of a sampling field for the document.

    Args:
        minimum: The least value, where the endpoint takes fewer than the field has.
    """
    spec = SAMPLING_FIELDS[name]
    low = spec.low if minimum is None else minimum
    return schema(**{"exclusiveMinimum" if spec.excludes_low else "minimum": low}, maximum=spec.high)


def _integral(value: Any) -> Any:
    """Turn 10.0 into an integer: JSON has one kind of number, and some languages write no other."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _token_ids(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:  # looking at each of many ids costs, so only now
        if not isinstance(value, list) or float not in set(map(type, value)):
            raise
        return handler([_integral(entry) for entry in value])


Integral = BeforeValidator(_integral)


def document_as(*required: str) -> ConfigDict:
    """Say in the document that these fields are needed. The parser reports their absence: a body always builds."""

    def require(document: dict[str, Any]) -> None:
        document["required"] = list(required)
        for name in required:
            field = document["properties"][name]
            field.pop("default", None)
            if "anyOf" in field:
                field["anyOf"] = [choice for choice in field["anyOf"] if choice != {"type": "null"}]

    return ConfigDict(json_schema_extra=require)


TokenId = Annotated[int, schema(minimum=0)]
TokenIds = Annotated[list[TokenId], FirstOnly(), WrapValidator(_token_ids)]


def _annotation(name: str, spec: SamplingField) -> Any:
    """Return the type of a sampling field in a body."""
    match spec.kind:
        case FieldKind.INTEGER:
            return Annotated[int, Integral, limits(name)] | None
        case FieldKind.NUMBER:
            return Annotated[float, limits(name)] | None
        case FieldKind.BOOLEAN:
            return bool | None
        case FieldKind.TOKEN_IDS:
            return Annotated[TokenIds, schema(minItems=spec.min_items or None)] | None
        case FieldKind.BIASES:
            return Annotated[dict[str, Any], schema(**_LOGIT_BIAS)] | None
        case FieldKind.STRINGS:
            text = Annotated[str, schema(minLength=1, maxLength=spec.max_chars)]
            texts = Annotated[list[text], FirstOnly(), schema(maxItems=spec.max_items)]
            return Annotated[text | texts | None, either("a string or a list of strings")]
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
    """How a stream ends."""

    include_usage: bool | None = None
    """One more chunk before the end, with no choices and the token counts."""
    include_obfuscation: bool | None = not_served(False)


class SamplingBody(SamplingFields):
    """Fields that completions and chat completions have in common."""

    model: str | None = None
    """Name of the model; null: the one served."""
    truncate_prompt_tokens: Annotated[int, Integral, schema(minimum=1)] | None = None
    """Keep only the last so many tokens of the prompt. Null: refuse what is too long."""
    priority: Annotated[int, Integral, schema(minimum=-(1 << 31), maximum=(1 << 31) - 1)] | None = None
    """Lower runs first. Null: 0."""
    tenant: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Tenant, at most 256 bytes: tenants get fair shares. It is not verified. Null: `user`."""
    user: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """OpenAI's name of the end user, at most 256 bytes: the tenant where none is given."""
    cache_salt: Annotated[str, schema(maxLength=MAX_LABEL_BYTES)] | None = None
    """Prefixes are shared only between requests of equal salt."""
    stream: bool | None = None
    """Send the output as server-sent events while it grows, and `data: [DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    response_format: Any = not_served({"type": "text"})
    bad_words: Any = not_served([])
    structured_outputs: Any = not_served()
    prompt_logprobs: Any = not_served()
    metadata: Any = ignored()
    prompt_cache_key: Any = ignored()
    prompt_cache_retention: Any = ignored()
    safety_identifier: Any = ignored()
    service_tier: Any = ignored()
    store: Any = ignored()


_Text = Annotated[str, schema(minLength=1)]
_PromptIds = Annotated[TokenIds, schema(minItems=1)]
Prompt = (
    _Text
    | Annotated[list[_Text], FirstOnly(), MaxLen(MAX_PROMPTS), schema(minItems=1)]
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
    """New tokens at most, >= 1, or 0 with echo. Null: 16."""
    echo: bool | None = None
    """Repeat the prompt at the head of the text."""
    logprobs: Annotated[int, Integral, limits("logprobs")] | None = None
    """Report the log-probability of each token and of its so many best rivals, 0..20; with echo the prompt's as well.
    Null: none."""

    best_of: Any = not_served(1)
    suffix: Any = not_served("")


class ContentPart(Part):
    """One piece of a message's content; `text` is the only type served."""

    model_config = Part.model_config | {"extra": "allow"} | document_as("type", "text")

    type: Annotated[str, schema(const="text")]
    text: str | None = None

    @model_validator(mode="after")
    def _text_has_text(self) -> ContentPart:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text has a text")
        return self


class Message(Part):
    """One turn of a conversation."""

    model_config = document_as("role", "content")

    role: _Text
    """system, user, assistant, or what the model's chat template knows."""
    content: Annotated[
        str | Annotated[list[ContentPart], FirstOnly()] | None,
        either('text, or a list of parts like {"type": "text", "text": "…"}'),
    ] = None
    """Text; the texts of several parts are joined by line breaks."""
    name: str | None = None
    """The speaker's name, where the template uses it."""

    audio: Any = not_served()
    function_call: Any = not_served()
    tool_calls: Any = not_served([])
    tool_call_id: Any = not_served()
    # What the `message` of an answer carries, so that it can be sent back as it came.
    annotations: Any = ignored()
    refusal: Any = ignored()


class ChatFields(Body):
    """A conversation, and how it becomes a prompt."""

    messages: Annotated[list[Message], MaxLen(MAX_MESSAGES), schema(minItems=1)] | None = None
    """The conversation so far, at least one message."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn. Null: true."""
    chat_template_kwargs: Annotated[dict[str, Any], schema(propertyNames=_VARIABLE)] | None = None
    """Extra variables for the model's chat template."""


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

    audio: Any = not_served()
    function_call: Any = not_served("none")
    functions: Any = not_served([])
    modalities: Any = not_served(["text"])
    moderation: Any = not_served()
    parallel_tool_calls: Any = ignored()
    prediction: Any = not_served()
    prompt_cache_options: Any = ignored()
    reasoning_effort: Any = not_served("none")
    tool_choice: Any = not_served("none")
    tools: Any = not_served([])
    verbosity: Any = not_served()
    web_search_options: Any = not_served()


class TokenizeRequest(ChatFields):
    """POST /tokenize: either `prompt` or `messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("prompt", "messages")
            ]
        }
    )

    model: str | None = None
    """Name of the model; null: the one served."""
    prompt: str | None = None
    """Plain text."""
    add_special_tokens: bool | None = None
    """Begin and end as the model's prompts do. Null: true for a prompt; a chat template brings its own."""


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model_config = document_as("tokens")

    model: str | None = None
    """Name of the model; null: the one served."""
    tokens: TokenIds | None = None
    """Token ids."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Null: true."""
