"""Builds a `Generation` from a prompt in any of its forms and its sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, cast

from triptych.client.conversation import DEFAULT_CHAT, ChatOptions, Conversation, fill_chat
from triptych.client.prompts import Prompt, is_conversation, parse_prompt, show
from triptych.errors import InvalidRequest
from triptych.types.output_limits import RepetitionDetection
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind, SamplingParams
from triptych.types.structured import StructuredOutputs
from triptych.v1 import common_pb2, generation_pb2, sampling_pb2
from triptych.wire.generation import LOGPROB_FIELDS, SAMPLING_PATHS
from triptych.wire.structured import structured_to_proto

Sampling: TypeAlias = SamplingParams | Mapping[str, Any] | None
"""How to sample. Every field of a SamplingParams object is sent. A mapping sends
the fields that it names, and None nothing; the model's generation_config.json, then the server's defaults,
stand for what is not sent."""

_OPTION_PATHS = {
    "model": "model",
    "adapter": "adapter",
    "priority": "priority",
    "tenant": "tenant",
    "cache_salt": "cache.salt",
    "truncate_prompt_tokens": "truncation.max_tokens",
}
"""Field of `RequestOptions` -> its path in a `Generation`."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request besides prompt and sampling; the defaults are those of generation.proto."""

    request_id: str = ""
    model: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    whole_choices: bool = False
    """Send each choice only when it has ended."""
    chat: ChatOptions = DEFAULT_CHAT
    """Options of a conversation; others ignore them."""
    emitted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Go on with an answer that broke off: index of each choice to go on with -> its output tokens so far."""
    adapter: str = ""
    """Name of a LoRA adapter of the model. Empty: none, unless the model's name is one's."""


DEFAULT_OPTIONS = RequestOptions()


def build_generation(
    prompt: Prompt, sampling: Sampling, options: RequestOptions
) -> generation_pb2.Generation:
    """Return the message to send.

    Raises:
        InvalidRequest: A value does not fit into the message; names the field. All other checks are the server's.
    """
    generation = generation_pb2.Generation()
    for name, path in _OPTION_PATHS.items():
        value = getattr(options, name)
        if value is not None and value != "":
            _assign(generation, path, value)
    for index, token_ids in options.emitted.items():
        _extend(generation.emitted.add(index=index).token_ids, token_ids, "emitted")
    response = generation.response
    response.whole_choices = options.whole_choices
    response.timings = True
    _set_prompt(generation, prompt, options.chat)
    response.prompt_token_ids = not generation.HasField("token_ids")  # else we have them
    if sampling is not None:
        _set_sampling(generation, sampling)
    return generation


def build_tokenize_request(
    prompt: Prompt, model: str, chat: ChatOptions = DEFAULT_CHAT
) -> generation_pb2.TokenizeRequest:
    """Return the message to send.

    Raises:
        InvalidRequest: It is no prompt, or token ids already.
    """
    request = generation_pb2.TokenizeRequest(model=model)
    _set_prompt(request, prompt, chat)
    return request


def _set_prompt(
    request: generation_pb2.Generation | generation_pb2.TokenizeRequest,
    prompt: Prompt,
    chat: ChatOptions = DEFAULT_CHAT,
) -> None:
    prompt = parse_prompt(prompt).content
    if isinstance(prompt, str):
        _assign(request, "text.text", prompt, "prompt")
        request.text.SetInParent()  # an empty text is there, and refused by the server as what it is
    elif is_conversation(prompt):
        fill_chat(request.chat, cast(Conversation, prompt), chat)
    elif isinstance(request, generation_pb2.Generation):
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, cast("Sequence[int]", prompt), "prompt")
    else:
        raise InvalidRequest("prompt", "these are token ids already")


def _set_sampling(
    generation: generation_pb2.Generation, sampling: SamplingParams | Mapping[str, Any]
) -> None:
    if isinstance(sampling, SamplingParams):
        values = {name: getattr(sampling, name) for name in SAMPLING_PATHS}
        if sampling.allowed_token_ids == ():  # the default means all; an empty list is refused by the server
            del values["allowed_token_ids"]
        if not sampling.logprob_token_ids:
            del values["logprob_token_ids"]
        if sampling.max_tokens is None:
            generation.length.rest_of_context.SetInParent()
    elif isinstance(sampling, Mapping):
        values = dict(sampling)
    else:
        raise InvalidRequest("sampling_params", f"expected SamplingParams, not {show(sampling)}")
    for name, value in values.items():
        if name not in SAMPLING_PATHS:
            raise InvalidRequest(f"sampling.{name}", "no such field")
        if value is not None:
            _set_sampling_field(generation, name, value)


def _set_sampling_field(generation: generation_pb2.Generation, name: str, value: Any) -> None:
    path = SAMPLING_PATHS[name]
    match SAMPLING_FIELDS[name].kind:
        case FieldKind.STRINGS | FieldKind.WORDS:
            _extend(_find(generation, path), [value] if isinstance(value, str) else value, path)
        case FieldKind.TOKEN_IDS:
            if name == "logprob_token_ids":
                if generation.response.logprobs.top:
                    raise InvalidRequest(
                        path, "has no place beside logprobs above 0: report these or the best"
                    )
                generation.response.logprobs.with_bytes = True
            column = _find(generation, path)
            if isinstance(column, common_pb2.TokenIds):
                column.SetInParent()  # an empty list differs from an absent one
                column = column.ids
            _extend(column, value, path)
        case FieldKind.BIASES:
            _set_biases(_find(generation, path), value, path)
        case FieldKind.REPETITION:
            _set_repetition(generation.length.repetition_detection, value, path)
        case FieldKind.STRUCTURED:
            _set_form(generation, value, path)
        case _ if name in LOGPROB_FIELDS:
            options = getattr(generation.response, name)
            options.with_bytes = True
            if value == -1:
                options.whole_vocabulary.SetInParent()
            else:
                _assign(generation, path, value)
        case _:
            _assign(generation, path, value)


def _set_repetition(message: sampling_pb2.RepetitionDetection, detection: Any, field: str) -> None:
    """Set when a repetition ends the output.

    Args:
        detection: A `RepetitionDetection`, or a mapping of its fields.
    """
    try:
        detection = RepetitionDetection(**detection) if isinstance(detection, Mapping) else detection
        message.MergeFrom(sampling_pb2.RepetitionDetection(**asdict(detection)))
        message.SetInParent()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"{show(detection)} cannot be sent: {error}") from None


def _set_form(generation: generation_pb2.Generation, form: Any, field: str) -> None:
    """Set the form of the output.

    Args:
        form: A `StructuredOutputs`, or a mapping of its fields.
    """
    try:
        form = StructuredOutputs(**form) if isinstance(form, Mapping) else form
        if not isinstance(form, StructuredOutputs):
            raise TypeError("expected StructuredOutputs, or a mapping of its fields")
        generation.structured_outputs.CopyFrom(structured_to_proto(form))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"{show(form)} cannot be sent: {error}") from None


def _set_biases(column: Any, biases: Any, field: str) -> None:
    try:
        for token_id, bias in biases.items() if isinstance(biases, Mapping) else biases:
            column[token_id] = bias
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"{show(biases)} cannot be sent: {error}") from None


def _find(message: Any, path: str) -> Any:
    """Return the field of a path like `length.stop`."""
    for name in path.split("."):
        message = getattr(message, name)
    return message


def _assign(message: Any, path: str, value: Any, field: str = "") -> None:
    """Set the field of a path like `length.max_tokens`; `field` names it in errors, if not by its path."""
    parent, _, name = path.rpartition(".")
    try:
        setattr(_find(message, parent) if parent else message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field or path, f"{show(value)} cannot be sent: {error}") from None


def _extend(column: Any, values: Iterable[Any], field: str) -> None:
    try:
        column.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"a value cannot be sent: {error}") from None
