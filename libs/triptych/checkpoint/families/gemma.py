"""Gemma 1 to 3: norms with `1 + weight`, an embedding times sqrt(hidden size), gelu; from 2 on also norms after each
block, windows and capped scores."""

from __future__ import annotations

import math
from dataclasses import replace

from triptych.checkpoint.architecture import BlockSpec, EndsSpec, ModelArchitecture, NormSpec
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    WITH_IMAGES,
    Sizes,
    describe,
    describe_layers,
    read_activation,
    read_layer_types,
    read_rope,
    read_sizes,
    read_window,
)
from triptych.checkpoint.tensor_names import TensorNames


def _block(config: ConfigFile, key: str) -> BlockSpec:
    norm = NormSpec(eps=config.number("rms_norm_eps", default=1e-6), offset=1.0)
    bias = config.boolean("attention_bias", default=False)
    return BlockSpec(
        norm=norm,
        qk_norm_spec=norm,
        activation=read_activation(config, key, default="gelu_pytorch_tanh"),
        qkv_bias=bias,
        out_bias=bias,
    )


def _ends(config: ConfigFile, sizes: Sizes) -> EndsSpec:
    # the factor that models were trained with is in the precision of the checkpoint
    return EndsSpec(
        embedding_multiplier=math.sqrt(sizes.hidden_size),
        logits_soft_cap=config.number("final_logit_softcapping", default=0.0),
    )


def gemma(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=256)
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=read_rope(config, sizes)
    )
    # older files say `hidden_act: gelu` and mean the other form, which `hidden_activation` names
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    block = _block(config, key)
    if key == "hidden_act" and config.values.get(key) == "gelu":
        block = replace(block, activation="gelu_pytorch_tanh")
    config.pass_over("hidden_act")
    config.expect("use_bidirectional_attention", False, otherwise="tokens would see later ones")
    return describe(config, sizes, layers=layers, block=block, ends=_ends(config, sizes), is_tied=True)


def gemma2(config: ConfigFile) -> ModelArchitecture:
    config.assume(sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config.pass_over("sliding_window_size")
    return _with_windows(config, every=2, qk_norm="none", is_2=True)


def gemma3(config: ConfigFile, *, names: TensorNames | None = None) -> ModelArchitecture:
    # what composite files leave out
    config.assume(
        vocab_size=262208,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        sliding_window=4096,
    )
    return _with_windows(config, every=_pattern(config), qk_norm="head", is_2=False, names=names)


def _pattern(config: ConfigFile) -> int:
    key = "sliding_window_pattern" if config.has("sliding_window_pattern") else "_sliding_window_pattern"
    return config.integer(key, default=6)


def _with_windows(
    config: ConfigFile, *, every: int, qk_norm: str, is_2: bool, names: TensorNames | None = None
) -> ModelArchitecture:
    """Read a family in which all layers but every so manieth have a window.

    Args:
        is_2: Whether it is Gemma 2, which has one rotary embedding for all layers.
    """
    sizes = read_sizes(config, default_head_dim=256)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if (index + 1) % every else FULL
    )
    local_theta = config.positive("rope_local_base_freq", default=10000.0, maximum=1e15)
    theta = 10000.0 if is_2 else 1000000.0
    ropes = {
        kind: read_rope(config, sizes, layer_type=kind, theta=theta) for kind in dict.fromkeys(layer_types)
    }
    nested = config.section("rope_parameters")
    if not is_2 and SLIDING in ropes and (nested is None or not nested.has(SLIDING)):
        ropes[SLIDING] = replace(ropes[SLIDING], theta=local_theta, kind="default", factor=1.0)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: ropes[kind],
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    config.pass_over("hidden_act", "cache_implementation")
    config.expect("use_bidirectional_attention", False, otherwise="tokens would see later ones")
    scalar = config.positive("query_pre_attn_scalar", default=256.0)
    block = replace(
        _block(config, "hidden_activation"),
        norms="both",
        qk_norm=qk_norm,
        attention_scale=scalar**-0.5,
        attention_soft_cap=config.number("attn_logit_softcapping", default=0.0),
    )
    return describe(
        config, sizes, layers=layers, block=block, ends=_ends(config, sizes), names=names, is_tied=True
    )


def gemma3_with_images(config: ConfigFile) -> ModelArchitecture:
    """Read the decoder of a composite checkpoint; its tower for images is left out."""
    config.pass_over(
        "vision_config",
        "image_token_index",
        "image_token_id",
        "boi_token_index",
        "eoi_token_index",
        "mm_tokens_per_image",
    )
    text = config.text_section()
    if config.has("tie_word_embeddings"):
        text.values = {**text.values, "tie_word_embeddings": config.boolean("tie_word_embeddings")}
    return gemma3(
        text,
        names=WITH_IMAGES,
    )
