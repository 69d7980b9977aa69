"""Sizes at which everything is measured: as in production, or just large enough to run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kernels.attention_step import Heads

_HEADS = Heads(num_heads=32, num_kv_heads=8, head_dim=128)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Production's, unless given."""

    copy_bytes: int = 4 << 30
    matrix: int = 8192
    """Rows and columns of the square product; its rate is the limit."""
    uncached_bytes: int = 256 << 20
    """Bytes that a row reads in turn so that no cache holds them: four times the L2 of an H200."""
    round_s: float = 0.25
    """Seconds that all rounds of one row take together."""
    heads: Heads = _HEADS
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    prefills: tuple[int, ...] = (4096, 16384)
    sampling_rows: int = 256
    vocab_size: int = 128256
    streams: int = 256
    """Requests of the full batch."""
    context: int = 1024
    """Tokens at which streams decode; prompts of whole requests are as long."""
    output_len: int = 256
    decode_steps: int = 64
    budget: int = 8192
    """Tokens of one step."""
    reduced_models: bool = False
    """Models have two narrow layers."""


REAL = Sizes()
TINY = Sizes(
    copy_bytes=1 << 16,
    matrix=64,
    uncached_bytes=1,
    round_s=0.001,
    heads=Heads(4, 2, 16),
    batches=(1, 3),
    contexts=(33,),
    prefills=(40,),
    sampling_rows=3,
    vocab_size=513,
    streams=3,
    context=20,
    output_len=6,
    decode_steps=4,
    budget=32,
    reduced_models=True,
)
