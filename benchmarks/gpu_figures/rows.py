"""A figure to measure, what came of it, and the sizes at which all are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure beside what the device could do."""

    value: float
    unit: str
    limit: float | None = None
    """In the same unit; None: there is none to compare with."""
    limit_name: str = ""
    less_is_better: bool = False
    low: float | None = None
    """Extremes over the rounds whose median `value` is, in the same unit."""
    high: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """Of the limit that was reached: 1 is all of it."""
        if not self.limit or not self.value:
            return None
        return self.limit / self.value if self.less_is_better else self.value / self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    section: str
    name: str
    measure: Callable[[], Measured]

    @property
    def title(self) -> str:
        return f"{self.section}: {self.name}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is: as in production, or just large enough to run."""

    copy_bytes: int
    matrix: int
    """Rows and columns of the square product whose rate is the limit."""
    uncached_bytes: int
    """What a row reads in turn, so that no cache holds it."""
    round_s: float
    """What the rounds of one row shall take together, seconds."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    token_counts: tuple[int, ...]
    """Of the steps that elementwise kernels and products work on."""
    hidden_size: int
    intermediate_size: int
    sampling_rows: int
    vocab_size: int
    streams: int
    """Of the full batch."""
    context: int
    """At which streams decode; prompts of the whole run are as long."""
    output_len: int
    decode_steps: int
    budget: int
    """Tokens of one step."""
    reduced_models: bool
    """Models have two narrow layers."""


REAL = Sizes(
    copy_bytes=4 << 30,
    matrix=8192,
    uncached_bytes=256 << 20,  # four times the L2 of an H200
    round_s=0.25,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    batches=(1, 8, 64, 256),
    contexts=(1024, 8192, 32768),
    prefills=(4096, 16384),
    token_counts=(256, 8192),
    hidden_size=4096,
    intermediate_size=14336,
    sampling_rows=256,
    vocab_size=128256,
    streams=256,
    context=1024,
    output_len=256,
    decode_steps=64,
    budget=8192,
    reduced_models=False,
)

TINY = Sizes(
    copy_bytes=1 << 16,
    matrix=64,
    uncached_bytes=1,
    round_s=0.001,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    batches=(1, 3),
    contexts=(33,),
    prefills=(40,),
    token_counts=(5,),
    hidden_size=64,
    intermediate_size=96,
    sampling_rows=3,
    vocab_size=513,
    streams=3,
    context=20,
    output_len=6,
    decode_steps=4,
    budget=32,
    reduced_models=True,
)
