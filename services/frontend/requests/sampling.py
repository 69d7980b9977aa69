"""The sampling fields of a request, one by one: type, range, and what is wrong in the client's own words."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.errors import FieldViolation, ModelError
from triptych.types.sampling import MAX_CHOICES, MAX_LOGPROBS
from triptych.types.step import U32

MAX_LOGIT_BIAS = 100.0
# Stop strings are looked for in every token's text, on the loop that serves everyone: with these bounds the
# worst output that a client can provoke costs about 1 ms per token.
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 256

# Long lists are looked at in parts: a thread lets the event loop run only between two calls into C.
_CHUNK_TOKENS = 8192
_U32_MAX = (1 << 32) - 1
_FLOAT32_OF_0_01 = 0.009999999776482582  # a client's 0.01 is rounded to this
INTEGER_LIMITS = {
    "n": (1, MAX_CHOICES),
    "max_tokens": (0, _U32_MAX),
    "min_tokens": (0, _U32_MAX),
    "top_k": (-1, (1 << 31) - 1),
    "seed": (0, (1 << 64) - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
FLOAT_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    # Far beyond these a logit divided or multiplied by it overflows, and the request fails in the worker.
    "repetition_penalty": (_FLOAT32_OF_0_01, 100.0),
}
_BOOLEANS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(slots=True)
class SamplingFields:
    """What the checks made of the given fields."""

    values: dict[str, Any] = field(default_factory=dict)
    """Arguments of `SamplingParams`; only good ones."""
    violations: list[FieldViolation] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Paths of fields that no one has built yet."""


def check_sampling(
    given: Mapping[str, Any], *, vocab_size: int, path: Callable[[str], str]
) -> SamplingFields:
    """Check each field by itself.

    Floats are rounded to float32 first, as the wire to the worker does, so that the same number means the
    same at every door.

    Args:
        given: field of `SamplingParams` -> raw value; None counts as not given.
        path: name of a field -> its path as the client wrote it.
    """
    result = SamplingFields()
    for name, value in given.items():
        if value is None:
            continue
        if _is_unsupported(name, value):
            result.unsupported.append(path(name))
            continue
        try:
            result.values[name] = _parse_field(name, value, vocab_size)
        except _BadValue as error:
            result.violations.append(FieldViolation(path(name) + error.where, error.description))
    return result


def check_defaults(defaults: Mapping[str, float]) -> dict[str, float]:
    """The sampling defaults of a checkpoint, held to the same limits as a client's values.

    Raises:
        ModelError: one is out of range; names it.
    """
    result = check_sampling(defaults, vocab_size=0, path=lambda name: name)
    if result.violations:
        raise ModelError("generation_config.json: " + "; ".join(map(str, result.violations)))
    return result.values


def find_bad_token_id(token_ids: Sequence[Any], vocab_size: int) -> tuple[int, str] | None:
    """Index of the first entry that is no token id, and what is wrong with it; None: all are."""
    for start in range(0, len(token_ids), _CHUNK_TOKENS):
        chunk = token_ids[start : start + _CHUNK_TOKENS]
        if set(map(type, chunk)) <= {int} and min(chunk) >= 0 and max(chunk) < vocab_size:
            continue  # three passes in C: 20 times faster than looking at each, and prompts are long
        for index, token_id in enumerate(chunk, start=start):
            if type(token_id) is not int:
                return index, f"{token_id!r} is not a token id"
            if not 0 <= token_id < vocab_size:
                return index, f"{token_id} is not in the vocabulary, 0..{vocab_size - 1}"
    return None


def to_array(token_ids: Sequence[int]) -> U32:
    """Return token ids that have been checked as an array."""
    starts = range(0, len(token_ids), _CHUNK_TOKENS)
    return np.concatenate(
        [np.array(token_ids[start : start + _CHUNK_TOKENS], dtype=np.uint32) for start in starts]
    )


def why_not_text(value: Any) -> str | None:
    """What keeps a value from being text that the wire and the tokenizer can take; None: it is text."""
    if not isinstance(value, str):
        return f"{value!r:.80} is not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return f"the character {value[error.start]!r} at position {error.start} is half of a surrogate pair"
    return None


class _BadValue(Exception):
    def __init__(self, description: str, where: str = "") -> None:
        super().__init__(description)
        self.description = description
        self.where = where


def _is_unsupported(name: str, value: Any) -> bool:
    if name in ("bad_words", "structured_outputs"):
        return bool(value)
    is_count = name in ("logprobs", "prompt_logprobs") and type(value) is int
    return is_count and value == -1  # the whole vocabulary


def _parse_field(name: str, value: Any, vocab_size: int) -> Any:
    if name in INTEGER_LIMITS:
        return _integer(value, *INTEGER_LIMITS[name])
    if name in FLOAT_LIMITS:
        low, high = FLOAT_LIMITS[name]
        return _float(value, low, high, is_low_refused=name == "top_p")
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise _BadValue(f"{value!r} is not true or false")
        return value
    if name == "stop":
        return _stop_strings(value)
    if name in ("stop_token_ids", "allowed_token_ids"):
        return _token_ids(value, vocab_size, may_be_empty=name == "stop_token_ids")
    if name == "logit_bias":
        return _logit_bias(value, vocab_size)
    raise _BadValue("no such sampling field")


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int:
        raise _BadValue(f"{value!r} is not an integer")
    _check_range(value, low, high)
    return value


def _float(value: Any, low: float, high: float, *, is_low_refused: bool = False) -> float:
    if type(value) not in (int, float):
        raise _BadValue(f"{value!r} is not a number")
    try:
        single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise _BadValue(f"{value:g} is beyond the range of a 32-bit float") from None
    if not math.isfinite(single):
        raise _BadValue(f"{value} is not a finite number")
    _check_range(single, low, high)
    if is_low_refused and single == low:
        raise _BadValue(f"{value:g} must be above {low:g}")
    return single


def _check_range(value: float, low: float, high: float) -> None:
    if value < low:
        raise _BadValue(f"{_show(value)} is below the limit {_show(low)}")
    if value > high:
        raise _BadValue(f"{_show(value)} is above the limit {_show(high)}")


def _show(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _stop_strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        raise _BadValue(f"{value!r} is not a list of strings")
    strings = tuple(value)
    if len(strings) > MAX_STOP_STRINGS:
        raise _BadValue(f"{len(strings)} strings are above the limit {MAX_STOP_STRINGS}")
    for index, text in enumerate(strings):
        if (why := why_not_text(text)) is not None:
            raise _BadValue(why, f"[{index}]")
        if not text:
            raise _BadValue("the empty string would end every output at once; leave it out", f"[{index}]")
        if len(text) > MAX_STOP_CHARS:
            raise _BadValue(f"{len(text)} characters are above the limit {MAX_STOP_CHARS}", f"[{index}]")
    return tuple(dict.fromkeys(strings))


def _token_ids(value: Any, vocab_size: int, *, may_be_empty: bool) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _BadValue(f"{value!r} is not a list of token ids")
    if not value and not may_be_empty:
        raise _BadValue("the empty list leaves no token to choose; name at least 1, or leave the field out")
    bad = find_bad_token_id(value, vocab_size)
    if bad is not None:
        raise _BadValue(bad[1], f"[{bad[0]}]")
    return tuple(sorted(set(value)))


def _logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys may be text: JSON knows no others."""
    if not isinstance(value, Mapping):
        raise _BadValue(f"{value!r} is not a map of token ids to biases")
    biases: dict[int, float] = {}
    for key, raw_bias in value.items():
        where = f"[{key}]"
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            raise _BadValue(f"{key!r} is not a token id", where) from None
        bad = find_bad_token_id((token_id,), vocab_size)
        if bad is not None:
            raise _BadValue(bad[1], where)
        try:
            bias = _float(raw_bias, -math.inf, math.inf)
        except _BadValue as error:
            raise _BadValue(error.description, where) from None
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return tuple(sorted(biases.items()))
