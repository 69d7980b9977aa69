"""internal/v1/sampling.proto: sampling parameters between the tiers."""

from __future__ import annotations

from typing import Any

from triptych.internal.v1 import sampling_pb2
from triptych.types.sampling import FieldKind, SamplingParams, fields_of

_DEFAULTS = SamplingParams()
_LISTS = fields_of(FieldKind.STRINGS, FieldKind.TOKEN_IDS)
_MAPS = fields_of(FieldKind.BIASES)
_SCALARS = fields_of(FieldKind.INTEGER, FieldKind.NUMBER, FieldKind.BOOLEAN)
_WITH_PRESENCE = tuple(
    name for name in _SCALARS if sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].has_presence
)
_WITHOUT_PRESENCE = tuple(name for name in _SCALARS if name not in _WITH_PRESENCE)


def sampling_to_proto(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return what differs from the defaults, without `output_kind`, which stays in the frontend."""
    message = sampling_pb2.SamplingParams()
    for name in _SCALARS:
        value = getattr(sampling, name)
        if value is not None and (value != getattr(_DEFAULTS, name) or name == "max_tokens"):
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(sampling, name))
    for name in _MAPS:
        getattr(message, name).update(getattr(sampling, name))
    return message


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Return the parameters of a message; trusts the values, which the frontend has checked.

    An absent `max_tokens` means None, the rest of the context.
    """
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _WITH_PRESENCE if message.HasField(name)
    }
    values.setdefault("max_tokens", None)
    values.update({name: getattr(message, name) for name in _WITHOUT_PRESENCE})
    values.update({name: tuple(getattr(message, name)) for name in _LISTS})
    values.update({name: tuple(sorted(getattr(message, name).items())) for name in _MAPS})
    return SamplingParams(**values)
