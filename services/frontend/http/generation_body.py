"""Fields of the bodies of every dialect that generates: sampling, forms of the answer, and how a request is scheduled.

The sampling fields that all dialects share are made from the table in `triptych.types.sampling`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, MaxLen
from pydantic import ConfigDict, Field, create_model

from triptych.types.output_limits import MAX_REPETITION
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingField
from triptych_services.frontend.http.body import Body, JsonObject, ignored, must_be, not_served
from triptych_services.frontend.http.fields import (
    FirstOnly,
    Integral,
    Text,
    TokenIds,
    TruncatedLength,
    document_as,
    exactly_one_of,
    limits,
    schema,
)
from triptych_services.frontend.requests.parse import MAX_LABEL_BYTES, MAX_REQUEST_ID_BYTES
from triptych_services.frontend.requests.raw import MAX_ABORTS

_LOGIT_BIAS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number"},
}
_CHECKPOINTS_DEFAULT = "the model's own default, else "
TemplateVariables = Annotated[dict[str, Any], schema(propertyNames={"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})]
_LEAST_SEED = -(1 << 63)


class RepetitionDetectionBody(JsonObject):
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
            return Annotated[text | texts | None, must_be("a string or a list of strings")]
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


class StructuredOutputsBody(JsonObject):
    """Exactly one form of the answer, and how its JSON is written. vLLM has the same object."""

    model_config = ConfigDict(
        json_schema_extra=exactly_one_of(
            "json", "regex", "choice", "grammar", "json_object", "structural_tag"
        )
    )

    json_: Annotated[
        dict[str, Any] | str | None, Field(alias="json"), must_be("a JSON schema: an object, or its text")
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
        dict[str, Any] | str | None, must_be("a structural tag: an object, or its text")
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
    truncate_prompt_tokens: TruncatedLength | None = None
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


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    model_config = document_as("lora_name", "lora_path")

    lora_name: str | None = None
    """Name that requests give as their model."""
    lora_path: str | None = None
    """Directory on the workers' machines, within `model.adapter_root`."""


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    model_config = document_as("lora_name")

    lora_name: str | None = None
    lora_int_id: Any = ignored()


class AbortRequest(Body):
    """POST /abort_requests."""

    model_config = document_as("request_ids")

    request_ids: Annotated[list[str], FirstOnly(), MaxLen(MAX_ABORTS), schema(minItems=1)] | None = None
    """X-Request-Ids of requests, `request_id`s that they were sent with, or ids of their answers. One that several
    requests share ends all of them."""
