"""internal/v1/sampling.proto: sampling parameters between the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from triptych.errors import InvalidRequest
from triptych.internal.v1 import sampling_pb2
from triptych.types.output_limits import RepetitionDetection, ThinkingBudget
from triptych.types.sampling import FieldKind, SamplingParams, fields_of
from triptych.types.structured import GrammarSyntax, compiled
from triptych.wire.codec import Codec, register

_LISTS = fields_of(FieldKind.STRINGS, FieldKind.TOKEN_IDS)
_WORDS = fields_of(FieldKind.WORDS)
_MAPS = fields_of(FieldKind.BIASES)
_MESSAGES: Mapping[str, type[RepetitionDetection] | type[ThinkingBudget]] = {
    **dict.fromkeys(fields_of(FieldKind.REPETITION), RepetitionDetection),
    **dict.fromkeys(fields_of(FieldKind.THINKING), ThinkingBudget),
}
"""Name of a field -> the type of its values; its message has the same name and fields."""
_STRUCTURED = fields_of(FieldKind.STRUCTURED)
_SCALARS = fields_of(FieldKind.INTEGER, FieldKind.NUMBER, FieldKind.BOOLEAN)
_NAMES = (*_SCALARS, *_LISTS, *_WORDS, *_MAPS, *_MESSAGES, *_STRUCTURED)
_get_values = attrgetter(*_NAMES)
_DEFAULTS = _get_values(replace(SamplingParams(), max_tokens=None))
_EMPTY = sampling_pb2.SamplingParams()
_ABSENT: dict[str, Any] = {
    "max_tokens": None,
    **{
        name: getattr(_EMPTY, name)
        for name in _SCALARS
        if not sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].has_presence
    },
    **dict.fromkeys((*_LISTS, *_WORDS, *_MAPS), ()),
}
"""Name of a field -> its value where a message does not have it. The default, if the name is missing here."""


def sampling_to_proto(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return what differs from the defaults, without `output_kind`, which stays in the frontend."""
    values: dict[str, Any] = {
        name: value
        for name, value, default in zip(_NAMES, _get_values(sampling), _DEFAULTS, strict=True)
        if value != default and value is not None
    }
    for name in _MAPS:
        if name in values:
            values[name] = dict(values[name])
    for name in _WORDS:
        if name in values:
            values[name] = [sampling_pb2.TokenSequence(token_ids=token_ids) for token_ids in values[name]]
    for name, kind in _MESSAGES.items():
        if name in values:
            values[name] = getattr(sampling_pb2, kind.__name__)(**asdict(values[name]))
    for name in _STRUCTURED:
        if name in values:
            assert values[name].syntax is GrammarSyntax.COMPILED, "the frontend has compiled it"
            values[name] = values[name].grammar
    return sampling_pb2.SamplingParams(**values)


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Return the parameters of a message; trusts values that are no numbers, which the frontend has checked.

    An absent `max_tokens` means None, the rest of the context.

    Raises:
        InvalidRequest: A number is out of range.
    """
    values = dict(_ABSENT)
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in _LISTS:
            value = tuple(value)
        elif name in _WORDS:
            value = tuple(tuple(sequence.token_ids) for sequence in value)
        elif name in _MAPS:
            value = tuple(sorted(value.items()))
        elif name in _MESSAGES:
            kind = _MESSAGES[name]
            value = kind(**{each.name: getattr(value, each.name) for each in fields(kind)})
        elif name in _STRUCTURED:
            value = compiled(value)
        values[name] = value
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise InvalidRequest("sampling", str(error)) from None


register(Codec(SamplingParams, sampling_pb2.SamplingParams, sampling_to_proto, sampling_from_proto))
