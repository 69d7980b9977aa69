"""How long a step takes: what it computes, and a linear model of the time for that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, in the three numbers that its time depends on."""

    num_prefill_tokens: int
    """Tokens that were known when their row entered: bound by arithmetic."""
    num_decode_rows: int
    """Rows that compute a token sampled since: bound by reading the weights, once for all of them."""
    num_context_tokens: int
    """Keys and values that attention reads: summed over the rows, the position after the last token."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds = base + what each part of the work costs; every coefficient >= 0."""

    base_ms: float
    """Of any step: reading the weights, launching kernels."""
    prefill_token_us: float
    decode_row_us: float
    context_token_ns: float

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds that a step of this work takes."""
        return round(
            self.base_ms * 1e6
            + self.prefill_token_us * 1e3 * work.num_prefill_tokens
            + self.decode_row_us * 1e3 * work.num_decode_rows
            + self.context_token_ns * work.num_context_tokens
        )
