"""Gemma 1 to 4: norms with `1 + weight`, an embedding times sqrt(hidden size), gelu; from 2 on also norms after each
block, windows and capped scores. Norms of Gemma 4 have the weight alone."""

from __future__ import annotations

import math
from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelArchitecture,
    NormSpec,
    RopeParameters,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    WITH_IMAGES,
    Sizes,
    describe,
    describe_layers,
    read_activation,
    read_experts,
    read_layer_types,
    read_rope,
    read_sizes,
    read_window,
    stacked_experts,
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


_GEMMA4_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


_GEMMA4_RENAMED = (
    (".mlp.gate.weight", ".router.proj.weight"),
    (".mlp.gate.per_expert_scale", ".router.per_expert_scale"),
)
_GEMMA4_FUSED = stacked_experts("experts", suffixes=("", ""))


def gemma4(config: ConfigFile, *, names: TensorNames | None = None) -> ModelArchitecture:
    """Read a family of full layers with heads of their own, of layers that read the keys of others, and of inputs of
    layers by token."""
    _assume_gemma4(config)
    sizes = read_sizes(config)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if (index + 1) % 6 else FULL
    )
    layer_types = (*layer_types[:-1], FULL)  # as transformers has it, whatever the file says
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    heads = _heads_by_layer(config, sizes, layer_types)
    layers = tuple(
        replace(layer, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, rope=_rope_of(config, own, kind))
        for layer, own, kind in zip(layers, heads, layer_types, strict=True)
    )
    layers = _with_shared_keys(config, layers, layer_types)
    layers = _with_experts(config, layers)
    norm = NormSpec(eps=config.number("rms_norm_eps", default=1e-6))
    block = replace(
        _block(config, "hidden_activation"),
        norm=norm,
        norms="both",
        qk_norm="head",
        qk_norm_spec=norm,
        v_norm=replace(norm, weight=False),
        attention_scale=1.0,
        has_layer_scalar=True,
    )
    ends = replace(_ends(config, sizes), layer_inputs=_layer_inputs(config))
    names = names or TensorNames()
    names = replace(names, renamed=(*names.renamed, *_GEMMA4_RENAMED), fused=_GEMMA4_FUSED)
    unread = [
        f"layers.{index}.self_attn.{name}.weight"
        for index, layer in enumerate(layers)
        if layer.kv_from >= 0
        for name in ("k_proj", "v_proj", "k_norm")
    ]
    names = replace(names, ignored=(*names.ignored, *unread))
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names, is_tied=True)


def _assume_gemma4(config: ConfigFile) -> None:
    """Take what files may leave out, and check what they must not say otherwise."""
    config.assume(
        vocab_size=262144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        sliding_window=512,
    )
    if not config.has("rope_parameters"):
        config.values = {**config.values, "rope_parameters": _GEMMA4_ROPES}
    if (ropes := config.section("rope_parameters")) is not None:
        ropes.pass_over(*_GEMMA4_ROPES)  # files have both, also of models with one kind of layers
    if config.values.get("use_bidirectional_attention") == "vision":
        config.pass_over("use_bidirectional_attention")  # of images, which there are none of
    else:
        config.expect("use_bidirectional_attention", False, otherwise="tokens would see later ones")


def _rope_of(config: ConfigFile, sizes: Sizes, layer_type: str) -> RopeParameters:
    theta = 1000000.0 if layer_type == FULL else 10000.0
    return read_rope(config, sizes, layer_type=layer_type, theta=theta)


def _heads_by_layer(config: ConfigFile, sizes: Sizes, layer_types: tuple[str, ...]) -> list[Sizes]:
    """Return the sizes by layer: newer files list them in `per_layer_config`, others have keys for full layers."""
    per_layer = config.section("per_layer_config")
    head_dim = config.integer("global_head_dim", default=512)
    kv_heads = config.integer("num_global_key_value_heads", default=sizes.num_kv_heads)
    if not config.boolean("attention_k_eq_v", default=False):
        kv_heads = sizes.num_kv_heads
    if per_layer is None:
        of_full = _checked(
            config, "num_global_key_value_heads", replace(sizes, num_kv_heads=kv_heads, head_dim=head_dim)
        )
        return [of_full if kind == FULL else sizes for kind in layer_types]
    found = [sizes] * sizes.num_layers
    for key in per_layer.values:
        if not key.isdecimal() or int(key) >= sizes.num_layers:
            per_layer.fail(
                key, per_layer.values[key], f"must be under the number of a layer, of {sizes.num_layers}"
            )
        own = per_layer.section(key)
        if own is None:
            continue
        for unknown in own.values.keys() - {"head_dim", "num_key_value_heads"}:
            own.fail(unknown, own.values[unknown], "differs by layer, which only the sizes of heads may")
        of_layer = replace(
            sizes,
            num_kv_heads=own.integer("num_key_value_heads", default=sizes.num_kv_heads),
            head_dim=own.integer("head_dim", default=sizes.head_dim),
        )
        found[int(key)] = _checked(own, "num_key_value_heads", of_layer)
    return found


def _checked(config: ConfigFile, key: str, sizes: Sizes) -> Sizes:
    if sizes.num_heads % sizes.num_kv_heads:
        config.fail(key, sizes.num_kv_heads, f"must divide num_attention_heads {sizes.num_heads}")
    return sizes


def _with_shared_keys(
    config: ConfigFile, layers: tuple[LayerSpec, ...], layer_types: tuple[str, ...]
) -> tuple[LayerSpec, ...]:
    """Return the layers of which the last ones read the keys and values of the last one of their type before them."""
    value_is_key = config.boolean("attention_k_eq_v", default=False)
    layers = tuple(
        replace(layer, value_is_key=value_is_key and kind == FULL)
        for layer, kind in zip(layers, layer_types, strict=True)
    )
    num_shared = config.integer("num_kv_shared_layers", default=0, minimum=0)
    is_double = config.boolean("use_double_wide_mlp", default=False)
    first = len(layers) - num_shared
    sources = {kind: index for index, kind in enumerate(layer_types[: max(first, 0)])}
    if num_shared and (first < 1 or not set(layer_types) <= sources.keys()):
        config.fail(
            "num_kv_shared_layers",
            num_shared,
            f"must leave a layer of each type in layer_types before the shared ones, of {len(layers)} layers",
        )
    return layers[:first] + tuple(
        replace(
            layer, kv_from=sources[kind], intermediate_size=layer.intermediate_size * (2 if is_double else 1)
        )
        for layer, kind in zip(layers[first:], layer_types[first:], strict=True)
    )


def _with_experts(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, each with a mixture beside its MLP if the file has one."""
    if not config.boolean("enable_moe_block", default=False):
        config.pass_over("num_experts", "top_k_experts", "moe_intermediate_size")
        return layers
    experts = replace(
        read_experts(config, "num_experts", chosen="top_k_experts"), has_norms=True, has_expert_scales=True
    )
    columns = config.integer("moe_intermediate_size")
    return tuple(
        replace(
            layer,
            mlp="experts",
            intermediate_size=columns,
            experts=replace(experts, shared_size=layer.intermediate_size),
        )
        for layer in layers
    )


def _layer_inputs(config: ConfigFile) -> LayerInputsSpec | None:
    config.assume(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144)
    size = (
        config.integer("hidden_size_per_layer_input", minimum=0)
        if config.has("hidden_size_per_layer_input")
        else 0
    )
    if not size:
        config.pass_over("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        return None
    rows, vocab_size = config.integer("vocab_size_per_layer_input"), config.integer("vocab_size")
    if rows < vocab_size:
        config.fail("vocab_size_per_layer_input", rows, f"must be at least vocab_size {vocab_size}")
    return LayerInputsSpec(size, rows)


def gemma4_with_images(config: ConfigFile) -> ModelArchitecture:
    """Read the decoder of a composite checkpoint; its towers for images and sound are left out."""
    config.pass_over(
        "vision_config",
        "audio_config",
        "image_token_id",
        "video_token_id",
        "audio_token_id",
        "boi_token_id",
        "eoi_token_id",
        "boa_token_id",
        "eoa_token_id",
        "eoa_token_index",
        "vision_soft_tokens_per_image",
    )
    text = config.text_section()
    if config.has("tie_word_embeddings"):
        text.values = {**text.values, "tie_word_embeddings": config.boolean("tie_word_embeddings")}
    towers = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
    return gemma4(text, names=replace(WITH_IMAGES, ignored_prefixes=towers))
