"""Rotary position embedding: the table of cosines and sines, by the checkpoint's kind of scaling.

A table has one row for each position, whatever the length of the sequence that the position is in, so that a cached
key stays valid. Two kinds scale by the length of a sequence; they take the longest that this worker admits instead:

    dynamic     Hugging Face scales the base anew for each length beyond the original one. Here it is scaled once, for
                `max_positions`, or not at all if that is within the original length. vLLM does the same for the length
                that the factor allows.
    longrope    Hugging Face divides by the short factors while a sequence fits the original length, else by the long
                ones. Here all positions take the short ones if `max_positions` fits, else the long ones, as in vLLM.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import RopeParameters
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext


class RotaryEmbedding(nn.Module):
    """The table that layers rotate by, as long as the longest sequence that this worker admits."""

    def __init__(self, head_dim: int, rope: RopeParameters, *, context: ModelContext) -> None:
        super().__init__()
        trained_positions = context.architecture.max_position_embeddings
        max_positions = context.max_positions
        table = cos_sin_table(head_dim, rope, max_positions, trained_positions=trained_positions)
        self.register_buffer("cos_sin_cache", table.to(context.device), persistent=False)
        self.cos_sin_cache: Tensor
        """[max_positions, rotary_dim] float32."""
        self.is_interleaved = rope.is_interleaved
        """Whether neighbours are rotated against each other, and not the halves of what is rotated."""


class RotaryTables:
    """The tables of one model, each made once: layers with the same parameters share it."""

    def __init__(self, *, context: ModelContext) -> None:
        self._context = context
        self._tables: dict[tuple[int, RopeParameters], RotaryEmbedding] = {}

    def find(self, head_dim: int, rope: RopeParameters) -> RotaryEmbedding:
        """Return the table of these parameters, and make it at the first call.

        Raises:
            FeatureDisabled: The kind of scaling is not supported.
        """
        key = (head_dim, rope)
        if key not in self._tables:
            self._tables[key] = RotaryEmbedding(head_dim, rope, context=self._context)
        return self._tables[key]


def cos_sin_table(
    head_dim: int, rope: RopeParameters, max_positions: int, *, trained_positions: int
) -> Tensor:
    """Return [max_positions, rotary_dim] float32: cosines, then sines, both times the attention factor.

    All operations are float32, in the order that models were trained with: at position 8,000 an exact frequency would
    change the angle by 5e-4.

    Args:
        max_positions: Number of positions, the longest sequence that is computed.
        trained_positions: The checkpoint's `max_position_embeddings`.
    Raises:
        FeatureDisabled: The kind of scaling is not supported.
    """
    rotary_dim = rope.rotary_dim or head_dim
    if rope.kind == "proportional":
        frequencies = _proportional_frequencies(rotary_dim, head_dim, rope)
    else:
        frequencies = _frequencies(rotary_dim, rope, max_positions, trained_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * _attention_factor(rope, trained_positions)


def _frequencies(rotary_dim: int, rope: RopeParameters, max_positions: int, trained_positions: int) -> Tensor:
    """Return [rotary_dim / 2] float32 radians per position."""
    original = rope.original_max_position_embeddings or trained_positions
    match rope.kind:
        case "default":
            return _plain_frequencies(rotary_dim, rope.theta)
        case "linear":
            return _plain_frequencies(rotary_dim, rope.theta) / rope.factor
        case "llama3":
            return _scale_llama3(_plain_frequencies(rotary_dim, rope.theta), original, rope)
        case "dynamic":
            stretch = rope.factor * max(max_positions, original) / original - (rope.factor - 1)
            return _plain_frequencies(
                rotary_dim, rope.theta * stretch ** (rotary_dim / max(rotary_dim - 2, 1))
            )
        case "yarn":
            return _yarn_frequencies(rotary_dim, original, _factor(rope, trained_positions), rope)
        case "longrope":
            divisors = rope.short_factor if max_positions <= original else rope.long_factor
            return 1.0 / (torch.tensor(divisors) * rope.theta ** _exponents(rotary_dim, rotary_dim))
    known = "default, linear, dynamic, llama3, yarn, longrope, proportional"
    raise FeatureDisabled(f"rope_type {rope.kind}", f"this worker knows {known}")


def _exponents(rotary_dim: int, size: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / size


def _plain_frequencies(rotary_dim: int, theta: float) -> Tensor:
    return 1.0 / (theta ** _exponents(rotary_dim, rotary_dim))


def _proportional_frequencies(rotary_dim: int, head_dim: int, rope: RopeParameters) -> Tensor:
    """Return frequencies for the whole head, in steps as if all of it were rotated, of which the last ones are 0."""
    frequencies = torch.zeros(head_dim // 2)
    frequencies[: rotary_dim // 2] = 1.0 / (rope.theta ** _exponents(rotary_dim, head_dim))
    return frequencies / rope.factor


def _scale_llama3(frequencies: Tensor, original: int, rope: RopeParameters) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between.

    Source: Llama 3.1's reference code, https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, frequencies, scaled)


def _yarn_frequencies(rotary_dim: int, original: int, factor: float, rope: RopeParameters) -> Tensor:
    """Keep frequencies that turn often within the original length, divide the slow ones, and blend in between.

    Source: YaRN, arXiv:2309.00071, section 3.2.
    """

    def place_of(turns: float) -> float:
        """Return the place of the frequency that turns so often within the original length."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place_of(rope.beta_fast), place_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # as in the reference code, which divides by the difference
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = rope.theta ** _exponents(rotary_dim, rotary_dim)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _attention_factor(rope: RopeParameters, trained_positions: int) -> float:
    """Return the factor of cosines and sines, which grows with the stretch of yarn and longrope."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    factor = _factor(rope, trained_positions)
    if factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        original = rope.original_max_position_embeddings or trained_positions
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _factor(rope: RopeParameters, trained_positions: int) -> float:
    """Return the stretch of yarn and longrope; a checkpoint that does not say it states both lengths instead."""
    if rope.factor != 1.0 or not rope.original_max_position_embeddings:
        return rope.factor
    return trained_positions / rope.original_max_position_embeddings
