"""Rotary tables: every kind of scaling against transformers' own frequencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import RopeParameters
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.rotary import RotaryEmbedding, RotaryTables, cos_sin_table

ORIGINAL = 64
"""Sequence length that these ropes extend."""

KINDS = [
    RopeParameters(theta=10000.0),
    RopeParameters(theta=500000.0, kind="linear", factor=4.0),
    RopeParameters(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    RopeParameters(
        theta=130000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    RopeParameters(kind="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL),
    RopeParameters(kind="yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False),
    RopeParameters(
        kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707
    ),
    RopeParameters(
        kind="yarn",
        factor=8.0,
        original_max_position_embeddings=2048,
        attention_factor=0.8,
        beta_fast=20.0,
        beta_slow=2.0,
    ),
    RopeParameters(theta=1000000.0, kind="proportional"),
    RopeParameters(theta=1000000.0, kind="proportional", factor=2.0),
]


def transformers_table(
    head_dim: int, rope: RopeParameters, length: int, trained_positions: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [length, rotary_dim / 2] that transformers computes for one whole sequence."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "partial_rotary_factor": (rope.rotary_dim or head_dim) / head_dim,
    }
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
        parameters |= {name: getattr(rope, name) for name in names}
    if rope.kind == "longrope":
        parameters |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        if rope.factor == 1.0:
            del parameters["factor"]
    if rope.original_max_position_embeddings:
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.attention_factor:
        parameters["attention_factor"] = rope.attention_factor
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=trained_positions,
        rope_parameters=parameters,
    )
    if rope.kind == "default" and rope.rotary_dim:
        # Llama rotates whole heads by its own function; a linear scaling of 1 is the same for a part of them
        config.rope_parameters |= {"rope_type": "linear", "factor": 1.0}
    assert config.rope_parameters["rope_type"] in {"default", *ROPE_INIT_FUNCTIONS}
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def assert_equals_transformers(
    head_dim: int, rope: RopeParameters, length: int, trained_positions: int = 16384, atol: float = 2e-6
) -> None:
    cos, sin = transformers_table(head_dim, rope, length, trained_positions)
    table = cos_sin_table(head_dim, rope, length, trained_positions=trained_positions)
    # the same float32 arithmetic: nothing but the last bit may differ
    torch.testing.assert_close(table, torch.cat((cos, sin), dim=1), rtol=0, atol=atol)


def name_of(rope: RopeParameters) -> str:
    return f"{rope.kind}-{rope.theta:g}-{rope.factor:g}"


@pytest.mark.parametrize("rope", KINDS, ids=name_of)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 0), (64, 0), (128, 0), (64, 16), (80, 32)])
def test_table_equals_that_of_transformers(rope: RopeParameters, head_dim: int, rotary_dim: int) -> None:
    assert_equals_transformers(head_dim, replace(rope, rotary_dim=rotary_dim), 9000)


def test_the_smallest_head_has_one_frequency() -> None:
    assert_equals_transformers(2, RopeParameters(), 100)


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("length", [40, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
def test_dynamic_scales_the_base_for_the_longest_sequence(length: int, rotary_dim: int) -> None:
    rope = RopeParameters(kind="dynamic", factor=4.0, rotary_dim=rotary_dim)
    # transformers computes the base in float32, where its last bit is an angle of 3e-8 for each position
    assert_equals_transformers(32, rope, length, trained_positions=ORIGINAL, atol=2e-5)


@pytest.mark.parametrize("factor", [1.0, 8.0], ids=["of both lengths", "8"])
@pytest.mark.parametrize("length", [40, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
def test_longrope_divides_by_the_factors_of_the_longest_sequence(length: int, factor: float) -> None:
    short, long = (tuple((torch.rand(16) + offset).tolist()) for offset in (1, 4))
    rope = RopeParameters(
        kind="longrope",
        factor=factor,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=ORIGINAL,
    )
    assert_equals_transformers(32, rope, length, trained_positions=4 * ORIGINAL)
    assert_equals_transformers(64, replace(rope, rotary_dim=32, attention_factor=1.5), length, 4 * ORIGINAL)


def test_an_unknown_kind_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(FeatureDisabled, match="rope_type axial: this worker knows default, linear, dynamic"):
        cos_sin_table(8, RopeParameters(kind="axial"), 4, trained_positions=4)


def test_layers_with_the_same_parameters_share_a_table() -> None:
    tables = RotaryTables(context=ModelContext(tiny_config()))
    local, whole = RopeParameters(), RopeParameters(theta=1e6, rotary_dim=4, is_interleaved=True)
    assert tables.find(8, local) is tables.find(8, replace(local))
    assert tables.find(8, whole) is not tables.find(8, local)
    assert tables.find(16, local) is not tables.find(8, local)
    assert tables.find(8, whole).is_interleaved
    assert tables.find(8, whole).cos_sin_cache.shape[1] == 4


def test_the_table_is_as_long_as_the_longest_admitted_sequence() -> None:
    architecture = tiny_architecture(max_position_embeddings=64)
    for asked, expected in ((0, 64), (48, 48)):
        rotary = RotaryEmbedding(
            8,
            RopeParameters(),
            context=ModelContext(tiny_config(architecture, max_model_len=asked)),
        )
        assert tuple(rotary.cos_sin_cache.shape) == (expected, 8)
        assert rotary.cos_sin_cache.dtype == torch.float32
