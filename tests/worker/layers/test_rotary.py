"""Rotary tables: every kind of scaling against transformers' own frequencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import RopeParameters
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.rotary import RotaryEmbedding, cos_sin_table, inverse_frequencies

KINDS = [
    RopeParameters(theta=10000.0),
    RopeParameters(theta=500000.0, kind="linear", factor=4.0),
    RopeParameters(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    RopeParameters(
        theta=130000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
]


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: f"{rope.kind}-{rope.theta:g}")
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
def test_table_equals_that_of_transformers(rope: RopeParameters, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9000)[None])
    table = cos_sin_table(inverse_frequencies(head_dim, rope), 9000)
    half = head_dim // 2
    # the same float32 arithmetic: nothing but the last bit may differ
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


def test_an_unknown_kind_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(FeatureDisabled, match="rope_type yarn: this worker knows default, linear, llama3"):
        inverse_frequencies(8, RopeParameters(kind="yarn"))


def test_the_table_is_as_long_as_the_longest_admitted_sequence() -> None:
    architecture = tiny_architecture(max_position_embeddings=64)
    for asked, expected in ((0, 64), (48, 48)):
        rotary = RotaryEmbedding(
            8,
            replace(architecture.rope),
            context=ModelContext(tiny_config(architecture, max_model_len=asked)),
        )
        assert tuple(rotary.cos_sin_cache.shape) == (expected, 8)
        assert rotary.cos_sin_cache.dtype == torch.float32
