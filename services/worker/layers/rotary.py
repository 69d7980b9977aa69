"""Rotary position embedding: the table of cosines and sines, by the checkpoint's kind of scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import RopeParameters
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext

ROPE_KINDS = ("default", "linear", "llama3")


class RotaryEmbedding(nn.Module):
    """The table that all layers of a model rotate by, as long as the longest sequence that this worker admits."""

    def __init__(self, head_dim: int, rope: RopeParameters, *, context: ModelContext) -> None:
        super().__init__()
        max_positions = (
            context.config.engine.model.max_model_len or context.architecture.max_position_embeddings
        )
        table = cos_sin_table(inverse_frequencies(head_dim, rope), max_positions)
        self.register_buffer("cos_sin_cache", table.to(context.device), persistent=False)
        self.cos_sin_cache: Tensor
        """[max_positions, head_dim] float32."""


def inverse_frequencies(head_dim: int, rope: RopeParameters) -> Tensor:
    """Return [head_dim / 2] float32 radians per position, largest first.

    All operations are float32, in the order that models were trained with: at position 8,000 an exact frequency would
    change the angle by 5e-4.

    Raises:
        FeatureDisabled: The kind of scaling is not supported.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(frequencies, rope)
    raise FeatureDisabled(f"rope_type {rope.kind}", f"this worker knows {', '.join(ROPE_KINDS)}")


def cos_sin_table(frequencies: Tensor, max_positions: int) -> Tensor:
    """Return [max_positions, 2 * num_frequencies] float32: cosines, then sines."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scale_llama3(frequencies: Tensor, rope: RopeParameters) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between.

    Source: Llama 3.1's reference code, https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, frequencies, scaled)
