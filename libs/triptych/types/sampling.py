"""The sampling parameters of a request, each declared once: type, default, range, meaning, and who uses it how.

`SAMPLING_FIELDS` is the table. The frontend checks requests against it and derives the fields of its HTTP API from
it, the codecs iterate over it, the checkpoint reader takes the defaults that it allows, and the worker makes the
columns of its sampler from it. To add a parameter, declare it here and in the protos, and use it where it takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum, auto
from numbers import Real
from operator import attrgetter
from typing import Any

from triptych.types.output_limits import RepetitionDetection, ThinkingBudget
from triptych.types.structured import StructuredOutputs

GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy: 1/T would overflow float16 logits
MAX_CHOICES = 16384  # the largest n
MAX_LOGPROB_TOKEN_IDS = 128  # the most named tokens per token
MAX_LOGPROBS = 20  # the most alternatives per token that a request may ask for
# Stop strings are looked for in every token's text, on the loop that serves everyone: with these bounds the
# worst output that a client can provoke costs about 1 ms per token.
MAX_BIASES = 300  # as OpenAI has it; an operator may allow more
_MAX_STOP_TOKEN_IDS = 128
_MAX_ALLOWED_TOKEN_IDS = (
    8192  # such a list is sorted, sent and spread over a row of logits beside others' steps
)
_MAX_STOP_STRINGS = 32
_MAX_STOP_CHARS = 256
_MAX_BAD_WORDS = 128
_U32_MAX = (1 << 32) - 1
_FLOAT32_OF_0_01 = 0.009999999776482582  # a client's 0.01 is rounded to this
# The most that these take in a message, with tags and lengths.
_NUMBER_BYTES = 12
_CHAR_BYTES = 4
_ITEM_BYTES = 5  # a character, or a token id


class OutputKind(IntEnum):
    """Content of one output: everything so far, the new part, or only the end."""

    CUMULATIVE = 1
    DELTA = 2
    FINAL_ONLY = 3


class FieldKind(Enum):
    """Form of a sampling field's values. It decides how a value is parsed, described and encoded."""

    INTEGER = auto()
    NUMBER = auto()
    """A finite number, rounded to float32."""
    BOOLEAN = auto()
    STRINGS = auto()
    """A tuple of non-empty strings, each there once."""
    WORDS = auto()
    """The same, of which a frontend makes a tuple of tuples of token ids for the worker."""
    TOKEN_IDS = auto()
    """An ascending tuple of ids below the vocabulary's size."""
    BIASES = auto()
    """A tuple of (token id, number) pairs, ascending by id."""
    THINKING = auto()
    """An integer, of which a frontend makes a `ThinkingBudget` for the worker, or None."""
    REPETITION = auto()
    """A `RepetitionDetection`, or None."""
    STRUCTURED = auto()
    """A `StructuredOutputs`, or None."""
    OUTPUT_KIND = auto()
    """An `OutputKind`; part of the request, not of the sampling message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """One row of the table."""

    kind: FieldKind
    default: Any
    help: str
    """Meaning of the values, and of None where it is allowed, in sentences for users."""
    low: float = -math.inf
    """The least valid number; biases below it are raised to it."""
    high: float = math.inf
    """The largest valid number; biases above it are lowered to it."""
    excludes_low: bool = False
    """`low` itself is not valid."""
    min_items: int = 0
    """The least number of entries in a list that a client sends."""
    max_items: int | None = None
    """The largest number of entries in a list, or None without a limit."""
    max_chars: int | None = None
    """The largest number of characters in each string, or None without a limit."""
    unsupported_values: tuple[int, ...] = ()
    """Values that the API knows and this version does not support."""
    is_common: bool = True
    """Whether every HTTP endpoint that generates takes the field under this name. The schema of each endpoint declares
    the other fields that it takes."""
    may_come_from_checkpoint: bool = False
    """Whether generation_config.json may give the default."""
    column: str = ""
    """Numpy dtype of the column that `ops.sample` takes under this name; empty if it takes none."""
    trial: Any = None
    """A value that takes effect, for warm-up and measurements; None if there is nothing to warm up."""


def _row(kind: FieldKind, default: Any, help: str, **row: Any) -> dict[str, SamplingField]:
    return {"spec": SamplingField(kind=kind, default=default, help=help, **row)}


def _declare(kind: FieldKind, default: Any, help: str, **row: Any) -> Any:
    return field(default=default, metadata=_row(kind, default, help, **row))


def _integer(default: int | None, low: int, high: int, help: str, **row: Any) -> Any:
    return _declare(FieldKind.INTEGER, default, help, low=low, high=high, **row)


def _number(default: float, low: float, high: float, help: str, **row: Any) -> Any:
    return _declare(FieldKind.NUMBER, default, help, low=low, high=high, **row)


def _boolean(default: bool, help: str, **row: Any) -> Any:
    return _declare(FieldKind.BOOLEAN, default, help, **row)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, and when its output ends.

    Lists, sets and arrays are taken wherever there are several values, a text as the only `stop`, a dictionary as
    `logit_bias`, None as no list. After construction all of these are tuples.

    A number out of range is refused here. Everything else is checked by the frontend
    (`triptych_services.frontend.requests.parse`); every other tier trusts the values.
    Sampler order: raw logprobs -> float32 -> allowed ids -> bad words -> min_tokens and logit_bias -> penalties ->
    greedy, or temperature -> min_p -> top_k, top_p -> sample.
    """

    n: int = _integer(
        1,
        1,
        MAX_CHOICES,
        "Choices per prompt; greedy sampling needs 1. Choice 0 is seeded with `seed`, the others with seeds derived "
        "from it.",
    )
    max_tokens: int | None = _integer(
        16,
        0,
        _U32_MAX,
        "New tokens at most; 0 only with log-probabilities of the prompt or echo. None is the rest of the context.",
        is_common=False,
    )
    min_tokens: int = _integer(
        0,
        0,
        _U32_MAX,
        "End-of-sequence and stop tokens are masked until this many tokens are out. At most max_tokens.",
        trial=2,
    )
    temperature: float = _number(
        1.0,
        0.0,
        2.0,
        "Divides the logits; below 1e-5 sampling is greedy.",
        may_come_from_checkpoint=True,
        column="float32",
        trial=1.0,
    )
    top_p: float = _number(
        1.0,
        0.0,
        1.0,
        "Keep the fewest best tokens whose probabilities sum up to top_p; 1 is off.",
        excludes_low=True,
        may_come_from_checkpoint=True,
        column="float32",
        trial=0.9,
    )
    top_k: int = _integer(
        0,
        -1,
        (1 << 31) - 1,
        "Keep only the k best tokens; 0 and -1 are off.",
        may_come_from_checkpoint=True,
        column="int32",
        trial=50,
    )
    min_p: float = _number(
        0.0,
        0.0,
        1.0,
        "Drop tokens less likely than min_p times the best one; 0 is off.",
        may_come_from_checkpoint=True,
        column="float32",
        trial=0.01,
    )
    presence_penalty: float = _number(
        0.0, -2.0, 2.0, "Subtracted once from the logit of each token that is in the output."
    )
    frequency_penalty: float = _number(
        0.0, -2.0, 2.0, "Subtracted from a token's logit for each time that the token is in the output."
    )
    # Far beyond these limits a logit overflows, and the request fails in the worker.
    repetition_penalty: float = _number(
        1.0,
        _FLOAT32_OF_0_01,
        100.0,
        "Divides positive and multiplies negative logits of tokens that are in the prompt or the output; 1 is off.",
        may_come_from_checkpoint=True,
        trial=1.1,
    )
    seed: int | None = _integer(
        None, 0, (1 << 64) - 1, "The same seed gives the same output. None and -1: one is drawn at admission."
    )
    stop: Sequence[str] = _declare(
        FieldKind.STRINGS,
        (),
        "Text that ends the output.",
        max_items=_MAX_STOP_STRINGS,
        max_chars=_MAX_STOP_CHARS,
    )
    stop_token_ids: Sequence[int] = _declare(
        FieldKind.TOKEN_IDS, (), "Token ids that end the output.", max_items=_MAX_STOP_TOKEN_IDS
    )
    include_stop_str_in_output: bool = _boolean(False, "Leave the stop string in the text.")
    thinking_token_budget: int | ThinkingBudget | None = field(
        default=None,
        metadata=_row(
            FieldKind.THINKING,
            None,
            "Tokens that the model may think before it answers; then its reasoning is ended. None and -1: no limit.",
            low=-1,
            high=(1 << 31) - 1,
        ),
    )
    repetition_detection: RepetitionDetection | None = field(
        default=None,
        metadata=_row(
            FieldKind.REPETITION, None, "End the output where its last tokens repeat a pattern. None: never."
        ),
    )
    ignore_eos: bool = _boolean(False, "Go on past the end-of-sequence token.")
    logprobs: int | None = _integer(
        None,
        0,
        MAX_LOGPROBS,
        "Report the log-probability of each output token and of so many best alternatives. None: report none.",
        unsupported_values=(-1,),
        is_common=False,
        trial=1,
    )
    logprob_token_ids: Sequence[int] = _declare(
        FieldKind.TOKEN_IDS,
        (),
        "Report the log-probabilities of these tokens, in place of those of the best alternatives.",
        max_items=MAX_LOGPROB_TOKEN_IDS,
        is_common=False,
    )
    prompt_logprobs: int | None = _integer(
        None,
        0,
        MAX_LOGPROBS,
        "The same for each token of the prompt but the first. None: report none.",
        unsupported_values=(-1,),
        is_common=False,
        trial=1,
    )
    logit_bias: Sequence[tuple[int, float]] | Mapping[int, float] = _declare(
        FieldKind.BIASES,
        (),
        "Token id to a number that is added to its logit, clamped to [-100, 100].",
        low=-100.0,
        high=100.0,
        max_items=MAX_BIASES,
        trial=((0, 1.0),),
    )
    allowed_token_ids: Sequence[int] = _declare(
        FieldKind.TOKEN_IDS,
        (),
        "Only these tokens may be sampled.",
        min_items=1,
        max_items=_MAX_ALLOWED_TOKEN_IDS,
        trial=(0, 1, 2),
    )
    bad_words: Sequence[str] | Sequence[tuple[int, ...]] = _declare(
        FieldKind.WORDS,
        (),
        "Texts: their tokens never follow one another in the output, at its beginning or behind a space as well.",
        max_items=_MAX_BAD_WORDS,
        max_chars=_MAX_STOP_CHARS,
        trial=((0,), (1, 2)),
    )
    structured_outputs: StructuredOutputs | None = field(
        default=None,
        metadata=_row(
            FieldKind.STRUCTURED, None, "Force the output into a form. None: free text.", is_common=False
        ),
    )
    speculation: bool = _boolean(
        True,
        "Let the worker guess tokens ahead and verify several in one step, where it does so. The tokens are the same.",
    )
    detokenize: bool = _boolean(True, "Turn tokens into text.", is_common=False)
    skip_special_tokens: bool = _boolean(True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = _boolean(True, "Put spaces between special tokens.")
    output_kind: OutputKind = field(
        default=OutputKind.CUMULATIVE,
        metadata=_row(
            FieldKind.OUTPUT_KIND, OutputKind.CUMULATIVE, "What one output carries.", is_common=False
        ),
    )

    def __post_init__(self) -> None:
        """Raise ValueError if numbers are out of range or none at all; names each field, value and limit."""
        if self.seed == -1:  # many clients say so that they name none
            object.__setattr__(self, "seed", None)
        if set(map(type, _get_lists(self))) != {tuple}:
            for name, _ in _LISTS:
                object.__setattr__(self, name, _to_tuple(name, getattr(self, name)))
        for number, bounds in zip(_get_numbers(self), _BOUNDS, strict=True):
            try:
                is_good = number is None or bounds[0] <= number <= bounds[1]
            except TypeError:
                is_good = False
            if not is_good and (problems := list(_find_problems(self))):
                raise ValueError("; ".join(problems))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_filters(self) -> bool:
        """Whether only the most likely tokens are chosen from."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def num_bytes(self) -> int:
        """An upper bound of the size of a message that holds these values, in bytes."""
        num_bytes = _NUMBER_BYTES * _NUM_NUMBERS
        if self.structured_outputs is not None:
            num_bytes += sum(_CHAR_BYTES * len(text) for text in self.structured_outputs.texts)
        if not any(_get_lists(self)):
            return num_bytes
        for name, entry_bytes in _LISTS:
            num_bytes += entry_bytes * len(getattr(self, name))
        for name in _LISTS_OF_LISTS:
            num_bytes += sum(_ITEM_BYTES * len(items) for items in getattr(self, name))
        return num_bytes


SAMPLING_FIELDS: Mapping[str, SamplingField] = {f.name: f.metadata["spec"] for f in fields(SamplingParams)}
"""Name of a field of `SamplingParams` -> its declaration."""


def fields_of(*kinds: FieldKind) -> tuple[str, ...]:
    """Return the names of the fields of these kinds, in the order of the table."""
    return tuple(name for name, spec in SAMPLING_FIELDS.items() if spec.kind in kinds)


_NUM_NUMBERS = len(SAMPLING_FIELDS) + len(fields(RepetitionDetection)) + len(fields(ThinkingBudget))
_ENTRY_BYTES = {FieldKind.STRINGS: 8, FieldKind.WORDS: 12, FieldKind.TOKEN_IDS: 5, FieldKind.BIASES: 16}
_LISTS = tuple((name, _ENTRY_BYTES[SAMPLING_FIELDS[name].kind]) for name in fields_of(*_ENTRY_BYTES))
_LISTS_OF_LISTS = fields_of(FieldKind.STRINGS, FieldKind.WORDS)
_get_lists = attrgetter(*(name for name, _ in _LISTS))

_NUMBERS = fields_of(FieldKind.INTEGER, FieldKind.NUMBER)
_get_numbers = attrgetter(*_NUMBERS)
# Every tier makes `SamplingParams`, so what is as it should be must be passed over quickly.
_BOUNDS = tuple(
    (math.nextafter(spec.low, math.inf) if spec.excludes_low else spec.low, spec.high)
    for spec in map(SAMPLING_FIELDS.__getitem__, _NUMBERS)
)


def _find_problems(params: SamplingParams) -> Iterator[str]:
    """Yield what is wrong with each number."""
    for name, (low, high) in zip(_NUMBERS, _BOUNDS, strict=True):
        spec = SAMPLING_FIELDS[name]
        number: Any = getattr(params, name)
        if number is None or number in spec.unsupported_values:
            continue
        is_number = isinstance(number, Real)
        if not is_number:
            yield f"{name}: {number!r:.40} is not a number"
        elif number < low:
            how = "must be above" if spec.excludes_low else "is below the limit"
            yield f"{name}: {_show(number)} {how} {_show(spec.low)}"
        elif number > high:
            yield f"{name}: {_show(number)} is above the limit {_show(spec.high)}"
        elif math.isnan(number):
            yield f"{name}: {number} is not a finite number"


def _show(number: Any) -> str:
    """Return a number as its writer knows it: a float32 of 0.01 is 0.01."""
    return f"{number:.7g}" if isinstance(number, float) else str(number)


def _to_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str):
        return (values,)
    if values is None or isinstance(values, tuple):
        return values or ()
    try:
        items = tuple(values.items() if isinstance(values, Mapping) else values)
    except TypeError:
        raise ValueError(f"{name}: {values!r:.40} is not a list") from None
    if len(items) < SAMPLING_FIELDS[name].min_items:  # an empty tuple is the default, and means all
        raise ValueError(
            f"{name}: the empty list leaves no token to choose; name at least 1, or leave it out"
        )
    return items
