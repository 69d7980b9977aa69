"""Sampling parameters as vLLM has them: with its names, and open to change until they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from triptych.client.beam_search import BeamSearchParams
from triptych.types import sampling
from triptych.types.output_limits import RepetitionDetection as RepetitionDetectionParams
from triptych.types.sampling import SAMPLING_FIELDS
from triptych.types.sampling import OutputKind as RequestOutputKind
from triptych.types.structured import FORM_NAMES, StructuredOutputs

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

_NOT_SERVED = {
    "best_of": "ask for n, and choose by cumulative_logprob",
    "extra_args": "",
    "flat_logprobs": "",
    "logits_processors": "",
    "prompt_logprob_start": "",
    "prompt_logprob_token_ids": "",
    "routed_experts_prompt_start": "",
    "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
    "trace_decode_token_ids": "",
    "watermarking": "",
}
"""Parameters that would change the output and are not served -> the remedy, if there is one."""
_HINTS = ("output_text_buffer_length", "skip_clone", "stream_interval")
"""Parameters that change no output; any value is taken."""


class SamplingParams(sampling.SamplingParams):
    """`triptych.SamplingParams` that may be changed; each change is checked as the whole is.

        params = llm.get_default_sampling_params()
        params.max_tokens = 8

    A request takes the values that they have when it is submitted. None means the default of a parameter.
    """

    __slots__ = ("truncate_prompt_tokens",)
    __hash__ = None  # type: ignore[assignment]  # they change

    truncate_prompt_tokens: int | None
    """Keep only so many tokens of the prompt, its last ones. None: all."""

    def __init__(self, **values: Any) -> None:
        """Take every parameter of vLLM's by name.

        Raises:
            ValueError: One is out of range, or asks for what is not served; names it, the value and the limit.
            TypeError: There is none of this name.
        """
        if (form := values.pop("guided_decoding", None)) is not None:
            values.setdefault("structured_outputs", form)
        object.__setattr__(self, "truncate_prompt_tokens", values.pop("truncate_prompt_tokens", None))
        given = {}
        for name, value in values.items():
            if name in _NOT_SERVED:
                if value and not (name == "best_of" and value == values.get("n", 1)):
                    remedy = f"; {_NOT_SERVED[name]}" if _NOT_SERVED[name] else ""
                    raise ValueError(f"{name}: {value!r:.40} is not served{remedy}")
            elif name not in SAMPLING_FIELDS and name not in _HINTS:
                raise TypeError(f"SamplingParams() got an unexpected keyword argument {name!r}")
            elif name not in _HINTS and (value is not None or name == "max_tokens"):
                given[name] = _to_ours(name, value)
        super().__init__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SAMPLING_FIELDS:
            self.__class__(**{name: value})  # which refuses what is no parameter, or is not served
            if name == "truncate_prompt_tokens":
                object.__setattr__(self, name, value)
            return
        changed = self.__class__(**{**self._values(), name: value})
        object.__setattr__(self, name, getattr(changed, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._values(),)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return the parameters; None means a default."""
        return cls(**values)

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return self.__class__(**self._values())

    def frozen(self) -> sampling.SamplingParams:
        """Return the parameters as they are now, for good."""
        return sampling.SamplingParams(**{name: getattr(self, name) for name in SAMPLING_FIELDS})

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*SAMPLING_FIELDS, *SamplingParams.__slots__)}


def _make(values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _to_ours(name: str, value: Any) -> Any:
    if name == "logit_bias" and isinstance(value, Mapping):
        return {int(token_id): bias for token_id, bias in value.items()}
    return value


class StructuredOutputsParams(StructuredOutputs):
    """`triptych.StructuredOutputs` with vLLM's parameters. Exactly one form is given."""

    __slots__ = ()
    _HINTS: ClassVar = ("backend", "backend_was_auto", "disable_fallback")

    def __init__(
        self,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        *,
        disable_any_whitespace: bool | None = None,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        structural_tag: str | Mapping[str, Any] | None = None,
        **hints: Any,
    ) -> None:
        """
        Args:
            disable_any_whitespace: False: the white space of JSON is the model's choice. Else there is none but the
                usual single spaces.
            hints: `backend` and the like of `GuidedDecodingParams`; they have no effect.

        Raises:
            ValueError: Not exactly one form is given, or one that is not served.
        """
        if unknown := hints.keys() - set(self._HINTS):
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        if disable_additional_properties:
            raise ValueError("disable_additional_properties: write additionalProperties into the schema")
        super().__init__(
            json=json,
            json_object=bool(json_object),
            regex=regex,
            choice=choice,
            grammar=grammar,
            structural_tag=structural_tag,
            any_whitespace=disable_any_whitespace is False,
            whitespace_pattern=whitespace_pattern,
        )
        if len(self.given) != 1:
            forms = ", ".join(self.given) or "none"
            raise ValueError(
                f"{forms}: exactly one of json, json_object, regex, choice, grammar and structural_tag is needed"
            )

    @classmethod
    def from_optional(cls, **values: Any) -> StructuredOutputsParams | None:
        """Return the form, or None where none is given."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**given) if any(given.get(name) for name in FORM_NAMES) else None


GuidedDecodingParams = StructuredOutputsParams
"""The name that `StructuredOutputsParams` had before."""
