"""Builds a GenerateRequest from a prompt in any of its forms and its sampling parameters."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypeAlias, cast

from triptych.errors import InvalidRequest
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.v1 import common_pb2, generation_pb2

Message: TypeAlias = Mapping[str, str]
"""One turn: `role`, `content` and, where the template uses it, `name`."""
Conversation: TypeAlias = Sequence[Message]
Prompt: TypeAlias = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation for the model's chat template."""
Sampling: TypeAlias = SamplingParams | Mapping[str, Any] | None
"""How to sample. Every field of a SamplingParams object is sent. A mapping sends
the fields that it names, and None nothing; the model's generation_config.json, then the server's defaults,
stand for what is not sent."""

_MESSAGE_KEYS = {"role", "content", "name"}
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "output_kind")
# Wrong values are shown in errors by their beginning: a list of thousands of prompts must not print itself.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_show = _SHORT.repr
_PROTO_KIND = {
    OutputKind.CUMULATIVE: common_pb2.OUTPUT_KIND_CUMULATIVE,
    OutputKind.DELTA: common_pb2.OUTPUT_KIND_DELTA,
    OutputKind.FINAL_ONLY: common_pb2.OUTPUT_KIND_FINAL_ONLY,
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request besides prompt and sampling; the defaults are those of generation.proto."""

    request_id: str = ""
    model: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.DELTA


DEFAULT_OPTIONS = RequestOptions()


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list; each checked for its form.

    A string, a list of integers and a list of messages are one prompt; a list of such is many.

    Raises:
        InvalidRequest: an item is none of these; names it.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequest(
            "prompts", f"expected text, token ids, messages or a list of these, not {_show(prompts)}"
        )
    if not prompts:
        return []
    if isinstance(prompts[0], Integral | Mapping):
        return [_check_prompt(prompts, "prompt")]
    return [_check_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def split_conversations(messages: Conversation | Sequence[Conversation]) -> list[Prompt]:
    """One conversation or a list of them, as a list.

    Raises:
        InvalidRequest: an item is no conversation; names it.
    """
    prompts = split_prompts(cast("Sequence[Prompt]", messages))
    for i, prompt in enumerate(prompts):
        if not is_conversation(prompt):
            raise InvalidRequest(f"messages[{i}]", f"expected a list of messages, not {_show(prompt)}")
    return prompts


def is_conversation(prompt: Prompt) -> bool:
    """Whether a prompt that `split_prompts` has checked is a list of messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def wants_rest_of_context(prompt: Prompt, sampling: Sampling) -> bool:
    """Whether max_tokens=None has to be turned into a number: on the wire its absence means 16, save for chat."""
    return (
        isinstance(sampling, SamplingParams) and sampling.max_tokens is None and not is_conversation(prompt)
    )


def build_request(
    prompt: Prompt, sampling: Sampling, options: RequestOptions
) -> generation_pb2.GenerateRequest:
    """The message to send.

    Raises:
        InvalidRequest: a value that the message cannot hold; names the field. All other checks are the server's.
    """
    request = generation_pb2.GenerateRequest(output_kind=_PROTO_KIND[options.output_kind])
    for name in ("request_id", "model", "priority", "tenant", "cache_salt", "truncate_prompt_tokens"):
        value = getattr(options, name)
        if value is not None:
            _assign(request, name, value, name)
    set_prompt(request, prompt)
    if sampling is not None:
        request.sampling.CopyFrom(_build_sampling(sampling))
    return request


def set_prompt(
    request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    """Fill in the prompt oneof of a request; token ids only where the request has a place for them.

    Raises:
        InvalidRequest: it is no prompt, or a token id is no u32.
    """
    prompt = _check_prompt(prompt, "prompt")
    if isinstance(prompt, str):
        _assign(request, "text", prompt, "prompt")
    elif is_conversation(prompt):
        for message in cast(Conversation, prompt):
            request.chat.messages.add(**message)
    elif isinstance(request, generation_pb2.GenerateRequest):
        request.token_ids.SetInParent()  # an empty list is there, and refused by the server as what it is
        _extend(request.token_ids.ids, cast("Sequence[int]", prompt), "prompt")
    else:
        raise InvalidRequest("prompt", "these are token ids already")


def _check_prompt(prompt: Any, where: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if all(isinstance(item, Mapping) for item in prompt):
            return [_check_message(item, f"{where}.messages[{i}]") for i, item in enumerate(prompt)]
        if all(isinstance(item, Integral) for item in prompt):
            return cast("Sequence[int]", prompt)
    raise InvalidRequest(
        where, f"expected text, a list of token ids or a list of messages, not {_show(prompt)}"
    )


def _check_message(message: Mapping[Any, Any], where: str) -> Message:
    if not {"role", "content"} <= message.keys() <= _MESSAGE_KEYS:
        raise InvalidRequest(
            where, f"expected role, content and perhaps name, not {sorted(message, key=str)}"
        )
    for key, value in message.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{key}", f"expected text, not {_show(value)}")
    return message


def _build_sampling(sampling: SamplingParams | Mapping[str, Any]) -> common_pb2.SamplingParams:
    if isinstance(sampling, SamplingParams):
        values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
        if sampling.allowed_token_ids == ():  # the default means all; an empty list is refused by the server
            del values["allowed_token_ids"]
    elif isinstance(sampling, Mapping):
        values = dict(sampling)
    else:
        raise InvalidRequest("sampling_params", f"expected SamplingParams, not {_show(sampling)}")
    message = common_pb2.SamplingParams()
    for name, value in values.items():
        field = f"sampling.{name}"
        if name not in _SAMPLING_FIELDS:
            raise InvalidRequest(field, "no such field")
        if value is None:
            continue
        if name in ("stop", "bad_words"):
            _extend(getattr(message, name), [value] if isinstance(value, str) else value, field)
        elif name == "stop_token_ids":
            _extend(message.stop_token_ids, value, field)
        elif name == "allowed_token_ids":
            message.allowed_token_ids.SetInParent()
            _extend(message.allowed_token_ids.ids, value, field)
        elif name == "logit_bias":
            _set_biases(message, value, field)
        else:
            _assign(message, name, value, field)
    return message


def _set_biases(message: common_pb2.SamplingParams, biases: Any, field: str) -> None:
    try:
        for token_id, bias in biases.items() if isinstance(biases, Mapping) else biases:
            message.logit_bias[token_id] = bias
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"{_show(biases)} cannot be sent: {error}") from None


def _assign(message: Any, name: str, value: Any, field: str) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"{_show(value)} cannot be sent: {error}") from None


def _extend(column: Any, values: Iterable[Any], field: str) -> None:
    try:
        column.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"a value cannot be sent: {error}") from None
