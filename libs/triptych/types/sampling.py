"""What a client may ask of the sampler; defaults as users of this field know them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy: 1/T would overflow float16 logits
MAX_CHOICES = 16384  # the largest n
_SCALAR_BYTES = 256  # of all fields of one number each, with their tags
MAX_LOGPROBS = 20  # the most alternatives per token that a request may ask for


class OutputKind(IntEnum):
    """What one output carries: everything so far, what is new, or only the end."""

    CUMULATIVE = 1
    DELTA = 2
    FINAL_ONLY = 3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Validated once, in the frontend (`services.frontend.requests.parse`); everyone behind it trusts the values.
    Sampler order: raw logprobs -> float32 -> allowed ids -> min_tokens and logit_bias -> penalties ->
    greedy, or temperature -> min_p -> top_k, top_p -> sample.
    """

    n: int = 1
    """Choices per prompt, 1..16384. Choice 0 is seeded with `seed`, choice i > 0 with `splitmix64(seed + i)`."""
    max_tokens: int | None = 16
    """New tokens at most, >= 1; 0 only with `prompt_logprobs` or echo. None: the rest of the context."""
    min_tokens: int = 0
    """EOS and stop ids are masked until this many tokens are out, 0..max_tokens."""
    temperature: float = 1.0
    """0..2; below 1e-5 is greedy."""
    top_p: float = 1.0
    """(0, 1]; 1 is off."""
    top_k: int = 0
    """The k best alone are kept; 0 or -1 is off."""
    min_p: float = 0.0
    """[0, 1]: tokens less likely than min_p * the best are dropped; 0 is off."""
    presence_penalty: float = 0.0
    """[-2, 2], subtracted once from every token already in the output."""
    frequency_penalty: float = 0.0
    """[-2, 2], subtracted once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """0.01..100, divides (or multiplies, if negative) the logits of tokens in prompt or output; 1 is off."""
    seed: int | None = None
    """Any u64. None: the frontend draws one at admission, so that resubmission repeats the tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends the output; judged by the frontend alone."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output; judged by the engine alone."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report per output token, 0..20; None: none, not even the chosen one's."""
    prompt_logprobs: int | None = None
    """Alternatives to report per token of the prompt but the first, 0..20; None: none, not even the token's own."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, each bias clamped to ±100."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def num_bytes(self) -> int:
        """An upper bound of what it takes in a message, in bytes."""
        num_ids = len(self.stop_token_ids) + len(self.allowed_token_ids)
        num_bytes = _SCALAR_BYTES + 5 * num_ids + 16 * len(self.logit_bias)
        for text in (*self.stop, *self.bad_words):
            num_bytes += 8 + 4 * len(text)
        return num_bytes
