"""Llama and the families that differ from it in a norm, a bias, a window or a factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from triptych.checkpoint.architecture import (
    XIELU,
    BlockSpec,
    EndsSpec,
    LayerSpec,
    ModelArchitecture,
    NormSpec,
    RopeParameters,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    Sizes,
    describe,
    describe_layers,
    read_activation,
    read_layer_types,
    read_query_scaling,
    read_qwen_layer_types,
    read_rope,
    read_sizes,
    read_window,
)
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

FUSED_QKV = FusedTensor("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
FUSED_GATE_UP = FusedTensor("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


def rms_block(config: ConfigFile, *, eps: float = 1e-6, activation: str = "silu") -> BlockSpec:
    """Return what most families of this file share: RMS norms before each block, no biases."""
    norm = NormSpec(eps=config.number("rms_norm_eps", default=eps))
    return BlockSpec(norm=norm, qk_norm_spec=norm, activation=read_activation(config, default=activation))


def _with_biases(block: BlockSpec, config: ConfigFile) -> BlockSpec:
    bias = config.boolean("attention_bias", default=False)
    return replace(block, qkv_bias=bias, out_bias=bias, mlp_bias=config.boolean("mlp_bias", default=False))


def llama(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, default_positions=2048)
    if config.has("layer_types"):
        config.words("layer_types", length=sizes.num_layers, among=(FULL,))
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=read_rope(config, sizes)
    )
    return describe(config, sizes, layers=layers, block=_with_biases(rms_block(config), config))


def apertus(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    config.expect("post_norm", False, otherwise="norms follow the blocks")
    config.expect("qk_norm", True, otherwise="queries and keys have no norms")
    config.expect("mlp_bias", False, otherwise="the MLP has biases")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=12000000.0),
        mlp="plain",
    )
    eps, bias = config.number("rms_norm_eps", default=1e-5), config.boolean("attention_bias", default=False)
    activation = config.text("hidden_act", default=XIELU)
    block = BlockSpec(
        norm=NormSpec(eps=eps),
        qk_norm="head",
        qk_norm_spec=NormSpec(eps=eps),
        qkv_bias=bias,
        out_bias=bias,
        activation=XIELU if activation == XIELU else read_activation(config),
    )
    names = TensorNames(
        renamed=(
            ("input_layernorm", "attention_layernorm"),
            ("post_attention_layernorm", "feedforward_layernorm"),
        )
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


def arcee(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes),
        mlp="plain",
    )
    block = _with_biases(rms_block(config, eps=1e-5, activation="relu2"), config)
    return describe(config, sizes, layers=layers, block=block)


def ernie(config: ConfigFile) -> ModelArchitecture:
    config.assume(head_dim=128)
    config.pass_over("weight_share_add_bias")
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=500000.0, is_interleaved=True),
    )
    bias = config.boolean("use_bias", default=False)
    block = replace(rms_block(config, eps=1e-5), qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    return describe(config, sizes, layers=layers, block=block, is_tied=True)


def exaone_layers(config: ConfigFile, sizes: Sizes, **mlp: Any) -> tuple[LayerSpec, ...]:
    """Describe layers of which some see a window, and the others have no positions, or all see everything.

    Args:
        mlp: As of `describe_layers`.
    """
    config.assume(sliding_window=4096)
    pattern, has_window = config.values.get("sliding_window_pattern"), config.has("sliding_window")
    config.pass_over("sliding_window_pattern")
    every = 1
    if has_window:  # LLLG, or its length
        every = (
            len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", default=4)
        )
    layer_types = read_layer_types(
        config,
        sizes.num_layers,
        default=lambda index: SLIDING if has_window and (index + 1) % max(every, 1) else FULL,
    )
    rope = read_rope(config, sizes)
    return describe_layers(
        sizes,
        rope=lambda index, kind: rope if kind == SLIDING or not has_window else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
        **mlp,
    )


def exaone(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = exaone_layers(config, sizes, intermediate_size=config.integer("intermediate_size"))
    block = replace(rms_block(config, eps=1e-5), norms="post", qk_norm="head")
    return describe(config, sizes, layers=layers, block=block)


def glm(config: ConfigFile, *, norms: str = "pre", names: TensorNames | None = None) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=128)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, partial=0.5, is_interleaved=True),
    )
    block = replace(
        rms_block(config, eps=1.5625e-07),
        norms=norms,
        qkv_bias=config.boolean("attention_bias", default=True),
    )
    return describe(
        config, sizes, layers=layers, block=block, names=names or TensorNames(fused=(FUSED_GATE_UP,))
    )


glm4 = partial(
    glm,
    norms="both",
    names=TensorNames(
        renamed=(
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ),
        fused=(FUSED_GATE_UP,),
    ),
)


def granite(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = granite_layers(config, sizes, intermediate_size=config.integer("intermediate_size"))
    block, ends = granite_multipliers(config)
    is_tied = has_granite_windows(config)
    return describe(config, sizes, layers=layers, block=block, ends=ends, is_tied=is_tied)


def has_granite_windows(config: ConfigFile) -> bool:
    """Return whether a file is of the members of the family with windows and sinks."""
    return architecture_name(config) in ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM")


def granite_layers(config: ConfigFile, sizes: Sizes, **mlp: Any) -> tuple[LayerSpec, ...]:
    """Describe Granite's attention, of which the members with windows name the frequencies of each layer.

    Args:
        mlp: As of `describe_layers`.
    """
    rope = read_rope(config, sizes)
    if not has_granite_windows(config):
        return describe_layers(sizes, rope=rope, **mlp)
    config.assume(sliding_window=128)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if index % 4 else FULL
    )
    thetas: tuple[float, ...] = (rope.theta,) * sizes.num_layers
    if config.has("layer_rope_theta"):  # 0: the layer has no positions
        thetas = config.numbers("layer_rope_theta", length=sizes.num_layers)
        for theta in thetas:
            if not 0 <= theta <= 1e15:
                config.fail("layer_rope_theta", theta, "must be from 0 to 1e+15")
    return describe_layers(
        sizes,
        rope=lambda index, kind: replace(rope, theta=thetas[index]) if thetas[index] else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
        **mlp,
    )


def granite_multipliers(config: ConfigFile) -> tuple[BlockSpec, EndsSpec]:
    """Return the forms of Granite's layers and ends, with their factors."""
    block = replace(
        _with_biases(rms_block(config), config),
        residual_multiplier=config.number("residual_multiplier", default=1.0),
        attention_scale=config.positive("attention_multiplier", default=1.0),
        has_sinks=has_granite_windows(config),
    )
    scaling = config.positive("logits_scaling", default=1.0)
    ends = EndsSpec(
        embedding_multiplier=config.number("embedding_multiplier", default=1.0), logits_multiplier=1 / scaling
    )
    return block, ends


def helium(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=128)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=100000.0, is_interleaved=True),
    )
    block = replace(_with_biases(rms_block(config, eps=1e-8), config), out_bias=False)
    return describe(config, sizes, layers=layers, block=block)


def hunyuan(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=read_hunyuan_rope(config, sizes)
    )
    names = TensorNames(renamed=HUNYUAN_NAMES)
    return describe(config, sizes, layers=layers, block=hunyuan_block(config, sizes), names=names)


HUNYUAN_NAMES = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))


def hunyuan_block(config: ConfigFile, sizes: Sizes) -> BlockSpec:
    config.expect("use_qk_norm", True, otherwise="queries and keys have no norms")
    config.expect("use_cla", False, otherwise="layers share their keys")
    config.expect("norm_type", "rms", otherwise="vectors are normalised in another way")
    config.expect("use_rotary_pos_emb", True, otherwise="positions are embedded in another way")
    config.expect("attention_head_dim", sizes.head_dim, otherwise="heads have another size")
    config.expect("add_classification_head", False, otherwise="the head gives no tokens")
    # of images, of a head for classes and of the tokenizer
    config.pass_over(
        "cla_share_factor", "class_num", "dense_list", "mask_init_id", "org_vocab_size", "pool_type"
    )
    config.pass_over("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id")
    return replace(
        _with_biases(rms_block(config, eps=1e-5), config),
        qk_norm="head",
        qk_norm_after_rope=True,
        mlp_bias=False,
    )


def read_hunyuan_rope(config: ConfigFile, sizes: Sizes) -> RopeParameters:
    """Read a rotary embedding of a base that a factor alpha has raised for good, under the name of a dynamic one."""
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    if rope is None or not rope.has("alpha"):
        return read_rope(config, sizes)
    alpha = rope.positive("alpha")
    if sizes.head_dim <= 2:
        config.fail("head_dim", sizes.head_dim, "must be above 2 beside rope_scaling.alpha")
    rope.pass_over("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    fixed = ConfigFile(config.path, {**config.values, "rope_scaling": None, "rope_parameters": None})
    if rope.has("rope_theta"):
        fixed.values = {**fixed.values, "rope_theta": rope.values["rope_theta"]}
    found = read_rope(fixed, sizes)
    rope.pass_over("type", "rope_type", "rope_theta", "original_max_position_embeddings")
    config.pass_over("rope_theta", "partial_rotary_factor")
    exponent = sizes.head_dim / (sizes.head_dim - 2)
    return replace(found, theta=found.theta * alpha**exponent)


def mistral(config: ConfigFile, *, names: TensorNames | None = None) -> ModelArchitecture:
    is_ministral3 = (
        architecture_name(config) == "Ministral3ForCausalLM"
        or config.values.get("model_type") == "ministral3"
    )
    if not is_ministral3:
        config.assume(sliding_window=4096)
    sizes = read_sizes(config)
    has_window = config.has("sliding_window")
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if has_window else FULL
    )
    rope = read_rope(config, sizes)
    query_scaling = read_query_scaling(config, sizes)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=rope,
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    block = replace(rms_block(config, eps=1e-5 if is_ministral3 else 1e-6), query_scaling=query_scaling)
    return describe(config, sizes, layers=layers, block=block, names=names)


def olmo(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=read_rope(config, sizes)
    )
    bias = config.boolean("attention_bias", default=False)
    block = BlockSpec(
        norm=NormSpec("layer", eps=1e-5, weight=False),
        activation=read_activation(config),
        qkv_bias=bias,
        out_bias=bias,
        clip_qkv=config.number("clip_qkv", default=0.0),
    )
    return describe(config, sizes, layers=layers, block=block)


def olmo2(config: ConfigFile) -> ModelArchitecture:
    """Read OLMo 2, and OLMo 3, which has windows and a rotary embedding for each type of layer."""
    sizes = read_sizes(config)
    is_3 = architecture_name(config) == "Olmo3ForCausalLM"
    if is_3:
        config.assume(sliding_window=4096)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if is_3 and (index + 1) % 4 else FULL
    )
    ropes = {
        kind: read_rope(config, sizes, layer_type=kind, theta=500000.0 if is_3 else 10000.0)
        for kind in dict.fromkeys(layer_types)
    }
    nested = config.section("rope_parameters")
    if SLIDING in ropes and (nested is None or not nested.has(SLIDING)):
        # a scaling beside all layers is that of those without a window
        ropes[SLIDING] = RopeParameters(
            theta=ropes[SLIDING].theta, original_max_position_embeddings=sizes.max_positions
        )
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: ropes[kind],
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(rms_block(config, eps=1e-5), norms="post", qk_norm="all", qkv_bias=bias, out_bias=bias)
    return describe(config, sizes, layers=layers, block=block)


def phi3(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layer_types = (SLIDING if config.has("sliding_window") else FULL,) * sizes.num_layers
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, other_kinds={"su": "longrope", "yarn": "longrope"}),
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    config.pass_over("original_max_position_embeddings", "interpolate_factor")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(key, False, otherwise="Phi 3 has no biases")
    config.expect("full_attn_mod", 1, otherwise="layers differ in their attention")
    names = TensorNames(fused=(FUSED_QKV, FUSED_GATE_UP))
    return describe(config, sizes, layers=layers, block=rms_block(config, eps=1e-5), names=names)


def qwen2(config: ConfigFile) -> ModelArchitecture:
    return _qwen(config, lambda block: replace(block, qkv_bias=True))


def mimo(config: ConfigFile) -> ModelArchitecture:
    """Read MiMo: Qwen 2 with layers beside the others that predict further tokens."""
    config.expect("attention_bias", True, otherwise="the projections of the attention have no biases")
    num_further = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    further = tuple(f"model.mtp_layers.{index}." for index in range(num_further))
    return replace(qwen2(config), names=TensorNames(ignored_prefixes=further))


def qwen3(config: ConfigFile) -> ModelArchitecture:
    bias = config.boolean("attention_bias", default=False)
    return _qwen(
        config,
        lambda block: replace(block, qk_norm="head", qkv_bias=bias, out_bias=bias),
        default_head_dim=128,
    )


def _qwen(
    config: ConfigFile, change: Callable[[BlockSpec], BlockSpec], *, default_head_dim: int = 0
) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=default_head_dim)
    layer_types = read_qwen_layer_types(config, sizes.num_layers)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    return describe(config, sizes, layers=layers, block=change(rms_block(config)))


def seed_oss(config: ConfigFile) -> ModelArchitecture:
    config.assume(head_dim=128)
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=read_rope(config, sizes)
    )
    block = replace(
        rms_block(config),
        qkv_bias=config.boolean("attention_bias", default=True),
        out_bias=config.boolean("attention_out_bias", default=False),
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
    return describe(config, sizes, layers=layers, block=block)


def smollm3(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    has_window = config.boolean("use_sliding_window", default=False) and config.has("sliding_window")
    config.pass_over("max_window_layers")
    interval = config.integer("no_rope_layer_interval", default=4)
    has_rope = [int((index + 1) % interval != 0) for index in range(sizes.num_layers)]
    if config.has("no_rope_layers"):
        has_rope = [int(flag) for flag in config.numbers("no_rope_layers", length=sizes.num_layers)]
    layer_types = read_layer_types(
        config,
        sizes.num_layers,
        default=lambda index: SLIDING if has_window and not has_rope[index] else FULL,
    )
    rope = read_rope(config, sizes, theta=2000000.0)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: rope if has_rope[index] else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    block = _with_biases(rms_block(config), config)
    return describe(config, sizes, layers=layers, block=block, is_tied=True)
