"""common.proto: sampling parameters and log-probabilities, between the tiers and in the public API."""

from __future__ import annotations

from typing import Any

from triptych.errors import FeatureDisabled
from triptych.types.outputs import Logprob, StageTimings, TokenLogprobs, Usage
from triptych.types.sampling import FieldKind, SamplingParams, fields_of
from triptych.v1 import common_pb2

_DEFAULTS = SamplingParams()
_NULLABLE_LISTS = ("allowed_token_ids",)
"""Lists whose message tells an empty list from an absent one."""
_LISTS = tuple(
    name for name in fields_of(FieldKind.STRINGS, FieldKind.TOKEN_IDS) if name not in _NULLABLE_LISTS
)
_MAPS = fields_of(FieldKind.BIASES)
_UNSERVED = ("structured_outputs",)
_SCALARS = fields_of(FieldKind.INTEGER, FieldKind.NUMBER, FieldKind.BOOLEAN)
_WITH_PRESENCE = tuple(
    name for name in _SCALARS if common_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].has_presence
)
_WITHOUT_PRESENCE = tuple(name for name in _SCALARS if name not in _WITH_PRESENCE)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Only what differs from the defaults is sent. `output_kind` belongs to the request, not to this message."""
    message = common_pb2.SamplingParams()
    for name in _SCALARS:
        value = getattr(sampling, name)
        if value is not None and (value != getattr(_DEFAULTS, name) or name == "max_tokens"):
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(sampling, name))
    for name in _NULLABLE_LISTS:
        if values := getattr(sampling, name):
            getattr(message, name).ids.extend(values)
    for name in _MAPS:
        getattr(message, name).update(getattr(sampling, name))
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """The inverse of `sampling_to_proto`; trusts the values, which the frontend has checked.

    An absent `max_tokens` means None, the rest of the context.

    Raises:
        FeatureDisabled: A field is set that nothing behind this serves.
    """
    for name in _UNSERVED:
        if message.HasField(name):
            raise FeatureDisabled(name, "this version does not serve it yet")
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _WITH_PRESENCE if message.HasField(name)
    }
    values.setdefault("max_tokens", None)
    values.update({name: getattr(message, name) for name in _WITHOUT_PRESENCE})
    values.update({name: tuple(getattr(message, name)) for name in _LISTS})
    values.update({name: tuple(getattr(message, name).ids) for name in _NULLABLE_LISTS})
    values.update({name: tuple(sorted(getattr(message, name).items())) for name in _MAPS})
    return SamplingParams(**values)


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def usage_from_proto(message: common_pb2.Usage) -> Usage:
    return Usage(message.num_prompt_tokens, message.num_output_tokens, message.num_cached_tokens)


def timings_to_proto(timings: StageTimings, tokenize_ns: int) -> common_pb2.StageTimings:
    return common_pb2.StageTimings(
        tokenize_ns=tokenize_ns,
        queued_ns=timings.queued_ns,
        prefill_ns=timings.prefill_ns,
        decode_ns=timings.decode_ns,
    )


def timings_from_proto(message: common_pb2.StageTimings) -> StageTimings:
    return StageTimings(message.queued_ns, message.prefill_ns, message.decode_ns)


def token_logprobs_to_proto(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=_logprob_to_proto(entry.chosen), top=[_logprob_to_proto(top) for top in entry.top]
    )


def token_logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        _logprob_from_proto(message.chosen), tuple(_logprob_from_proto(top) for top in message.top)
    )


def _logprob_to_proto(entry: Logprob) -> common_pb2.Logprob:
    return common_pb2.Logprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        text=entry.text,
        token_bytes=entry.token_bytes,
    )


def _logprob_from_proto(message: common_pb2.Logprob) -> Logprob:
    token_bytes = message.token_bytes if message.HasField("token_bytes") else None
    return Logprob(message.token_id, message.logprob, message.text, message.rank, token_bytes)
