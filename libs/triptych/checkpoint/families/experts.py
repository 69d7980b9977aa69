"""Families with a mixture of experts in place of the MLP: GPT-OSS, MiniMax M2, Mixtral, OLMoE, Phi 3.5 MoE,
Qwen 2 and 3 MoE.
"""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import (
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
    read_experts,
    read_layer_types,
    read_qwen_layer_types,
    read_rope,
    read_sizes,
    read_window,
    with_dense_layers,
)
from triptych.checkpoint.families.llama import rms_block
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames


def gpt_oss(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=64)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: FULL if index % 2 else SLIDING
    )
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config.fail("rope_parameters", None, "must be an object; this family rotates by yarn")
    experts = replace(read_experts(config), bias=True)
    config.expect(
        "experts_per_token", experts.num_experts_per_tok, otherwise="it contradicts num_experts_per_tok"
    )
    config.expect("swiglu_alpha", 1.702, otherwise="the slope of the experts' activation is another")
    config.expect("swiglu_limit", 7.0, otherwise="the limit of the experts' activation is another")
    # the activation has no other form; the length is said again by the rope
    config.pass_over("hidden_act", "initial_context_length")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=150000.0),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    bias = config.boolean("attention_bias", default=True)
    norm = NormSpec(eps=config.number("rms_norm_eps", default=1e-5))
    block = BlockSpec(norm=norm, qkv_bias=bias, out_bias=bias, activation="swiglu_oai", has_sinks=True)
    names = TensorNames(
        renamed=((".mlp.gate.", ".mlp.router."),),
        fused=tuple(
            FusedTensor(
                f"mlp.experts.{name}",
                tuple(f"mlp.experts.{part}" for part in parts),
                interleaved="rows",
                of_experts=True,
                is_transposed=True,
                suffixes=("", "_bias"),
            )
            for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
        ),
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


_MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
)


def minimax_m2(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    rotary_dim = config.integer("rotary_dim", default=sizes.head_dim)
    experts = read_experts(config)
    experts = replace(experts, score="sigmoid", correction_shape=(experts.num_experts,))
    config.expect("scoring_func", "sigmoid", otherwise="the router scores in another way")
    config.expect("use_routing_bias", True, otherwise="the router has no correction")
    config.expect("use_qk_norm", True, otherwise="queries and keys have no norms")
    config.expect("qk_norm_type", "per_layer", otherwise="queries and keys are normalised in another way")
    config.expect("shared_intermediate_size", 0, otherwise="there is a shared expert")
    # of the layers that predict further tokens, and of other members of the family
    config.pass_over(
        "attn_type_list", "layernorm_attention_alpha", "layernorm_full_attention_beta", "layernorm_mlp_beta",
        "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "router_jitter_noise",
    )  # fmt: skip
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=5000000.0, partial=rotary_dim / sizes.head_dim),
        experts=experts,
    )
    correction = "e_score_correction_bias"
    names = TensorNames(
        renamed=((f".mlp.gate.{correction}", f".block_sparse_moe.{correction}"), *_MIXTRAL_NAMES)
    )
    block = replace(rms_block(config), qk_norm="all")
    return describe(config, sizes, layers=layers, block=block, names=names)


def mixtral(config: ConfigFile) -> ModelArchitecture:
    config.assume(num_local_experts=8, num_experts_per_tok=2)
    sizes = read_sizes(config)
    layer_types = (SLIDING if config.has("sliding_window") else FULL,) * sizes.num_layers
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=1000000.0),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=read_experts(config),
    )
    names = TensorNames(renamed=_MIXTRAL_NAMES)
    return describe(config, sizes, layers=layers, block=rms_block(config, eps=1e-5), names=names)


def olmoe(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    renormalize = config.boolean("norm_topk_prob", default=False)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes),
        experts=read_experts(config, "num_experts", renormalize=renormalize),
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(
        rms_block(config, eps=1e-5),
        qk_norm="all",
        qkv_bias=bias,
        out_bias=bias,
        clip_qkv=config.number("clip_qkv", default=0.0),
    )
    return describe(config, sizes, layers=layers, block=block)


def phimoe(config: ConfigFile) -> ModelArchitecture:
    config.assume(num_local_experts=16, num_experts_per_tok=2)
    config.pass_over("input_jitter_noise")  # of training
    sizes = read_sizes(config)
    layer_types = (SLIDING if config.has("sliding_window") else FULL,) * sizes.num_layers
    experts = replace(
        read_experts(config, renormalize=False),
        score="sparsemixer",
        jitter=config.number("router_jitter_noise", default=0.01),
    )
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=_phimoe_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(
        rms_block(config),
        norm=NormSpec("layer", eps=config.number("rms_norm_eps", default=1e-5), bias=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    ends = EndsSpec(head_bias=config.boolean("lm_head_bias", default=False))
    names = TensorNames(renamed=_MIXTRAL_NAMES)
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names)


def _phimoe_rope(config: ConfigFile, sizes: Sizes) -> RopeParameters:
    """Read a rotary embedding of which longrope names the factor of cosines and sines for short and for long texts."""
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    found = read_rope(config, sizes, theta=1000000.0)
    if rope is None or found.kind != "longrope":
        return found
    factor = rope.positive("short_mscale")
    rope.expect("long_mscale", factor, otherwise="the factor changes with the length of a text")
    return replace(found, attention_factor=factor)


def qwen2_moe(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layer_types = read_qwen_layer_types(config, sizes.num_layers)
    experts = replace(
        read_experts(config, "num_experts", renormalize=config.boolean("norm_topk_prob", default=False)),
        shared_size=config.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    block = replace(rms_block(config), qkv_bias=config.boolean("qkv_bias", default=True))
    names = TensorNames(renamed=((".shared_experts.", ".shared_expert."),))
    return describe(config, sizes, layers=_qwen_dense(config, layers), block=block, names=names)


def qwen3_moe(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    has_window = config.boolean("use_sliding_window", default=False) and config.has("sliding_window")
    config.pass_over("max_window_layers")  # the window is that of all layers
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if has_window else FULL
    )
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = read_experts(config, key, renormalize=config.boolean("norm_topk_prob", default=False))
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(rms_block(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    return describe(config, sizes, layers=_qwen_dense(config, layers), block=block)


def _qwen_dense(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    every = config.integer("decoder_sparse_step", default=1)
    dense = config.indices("mlp_only_layers", length=len(layers))
    return with_dense_layers(
        layers, config.integer("intermediate_size"), lambda index: index in dense or (index + 1) % every != 0
    )
