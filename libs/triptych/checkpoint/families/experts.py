"""Families with a mixture of experts in place of the MLP: FlexOlmo, GPT-OSS, Laguna, Mellum, MiniMax M2, Mixtral,
OLMoE, Phi 3.5 MoE, Qwen 2 and 3 MoE.
"""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    ExpertsSpec,
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
    read_dense_layers,
    read_experts,
    read_layer_types,
    read_qwen_dense_layers,
    read_qwen_layer_types,
    read_rope,
    read_sizes,
    read_window,
    stacked_experts,
    with_dense_layers,
)
from triptych.checkpoint.families.llama import rms_block
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import TensorNames


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
        fused=stacked_experts("mlp.experts", interleaved="rows", is_transposed=True),
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


def laguna(config: ConfigFile) -> ModelArchitecture:
    """Read Laguna: gates of heads by softplus, layers of unlike numbers of heads, experts by corrected sigmoids."""
    config.assume(head_dim=128, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512)
    sizes = read_sizes(config)
    config.expect(
        "norm_topk_prob", True, otherwise="the weights of a token's experts are not divided by their sum"
    )
    config.expect("moe_apply_router_weight_on_input", False, otherwise="weights multiply what experts read")
    config.expect("moe_router_logit_softcapping", 0, otherwise="the router's logits have a limit")
    config.expect("decoder_sparse_step", 1, otherwise="layers with experts are chosen in another way")
    layers = _of_types(
        config,
        sizes,
        experts=replace(
            read_experts(config, "num_experts"),
            score="sigmoid",
            scale=config.positive("moe_routed_scaling_factor", default=1.0),
            correction_shape=(config.integer("num_experts"),),
            shared_size=config.integer("shared_expert_intermediate_size", default=512),
        ),
        first_dense=1,
        partial=0.5,
    )
    if config.has("num_attention_heads_per_layer"):
        heads = config.numbers("num_attention_heads_per_layer", length=sizes.num_layers)
        for number in heads:
            if number < 1 or number % sizes.num_kv_heads:
                why = f"must be a multiple of {sizes.num_kv_heads} key heads"
                config.fail("num_attention_heads_per_layer", number, why)
        layers = tuple(
            replace(layer, num_heads=int(number)) for layer, number in zip(layers, heads, strict=True)
        )
    gating = config.values.get("gating", True)
    config.pass_over("gating")
    if gating not in (True, "per-head", "per-element"):
        config.fail("gating", gating, "must be true, per-head or per-element")
    config.expect("attention_bias", False, otherwise="the attention has biases beside its gates")
    block = replace(
        rms_block(config),
        qk_norm="head",
        output_gate="elements" if gating == "per-element" else "heads",
        output_gate_function="softplus",
    )
    names = TensorNames(
        renamed=(
            (".self_attn.gate_proj", ".self_attn.g_proj"),
            (".mlp.gate.e_score", ".mlp.experts.e_score"),
            (".shared_experts.", ".shared_expert."),
        )
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


def mellum(config: ConfigFile) -> ModelArchitecture:
    """Read Mellum 2, Qwen 3's mixture with windows in some layers and a rotary embedding for each type of them."""
    config.assume(head_dim=128, num_experts_per_tok=8, moe_intermediate_size=896, sliding_window=1024)
    sizes = read_sizes(config)
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    config.assume(**{key: 64})
    experts = read_experts(config, key, renormalize=config.boolean("norm_topk_prob", default=True))
    layers = _of_types(config, sizes, experts=experts, first_dense=0, partial=1.0)
    # layers that predict further tokens are not read
    config.pass_over("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    bias = config.boolean("attention_bias", default=False)
    block = replace(rms_block(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    return describe(config, sizes, layers=layers, block=block, names=TensorNames(ignored_prefixes=("mtp.",)))


def _of_types(
    config: ConfigFile,
    sizes: Sizes,
    *,
    experts: ExpertsSpec,
    first_dense: int,
    partial: float,
) -> tuple[LayerSpec, ...]:
    """Describe layers with a rotary embedding for each type of attention, and a list of those with one MLP.

    Args:
        first_dense: How many first layers have one MLP, where there is no list.
        partial: The part of a head that is rotated in layers without a window, where the file has no ropes.
    """
    layer_types = read_layer_types(config, sizes.num_layers)
    thetas, used = {FULL: 500000.0, SLIDING: 10000.0}, dict.fromkeys(layer_types)
    default = partial if not config.has("rope_parameters") else 1.0
    ropes = {
        kind: read_rope(
            config,
            sizes,
            layer_type=kind,
            theta=thetas[kind],
            partial=default if kind == FULL else 1.0,
        )
        for kind in used
    }
    if (nested := config.section("rope_parameters")) is not None:
        nested.pass_over(*(kind for kind in thetas if kind not in used))
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=lambda index, kind: ropes[kind],
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    dense = read_dense_layers(config, sizes.num_layers, first=first_dense)
    if config.has("mlp_only_layers") and config.indices("mlp_only_layers", length=sizes.num_layers) != dense:
        config.fail(
            "mlp_only_layers", config.values["mlp_only_layers"], "must name the dense mlp_layer_types"
        )
    return with_dense_layers(layers, config.integer("intermediate_size"), dense)


def olmoe(config: ConfigFile) -> ModelArchitecture:
    """Read OLMoE, and FlexOlmo, which has norms after blocks in place of those before them."""
    is_flex = architecture_name(config) == "FlexOlmoForCausalLM"
    if is_flex:
        config.assume(num_experts=7, num_experts_per_tok=5)
    sizes = read_sizes(config, default_positions=4096)
    renormalize = config.boolean("norm_topk_prob", default=False)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=500000.0 if is_flex else 10000.0),
        experts=read_experts(config, "num_experts", renormalize=renormalize),
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(
        rms_block(config, eps=1e-6 if is_flex else 1e-5),
        norms="post" if is_flex else "pre",
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
    dense = read_qwen_dense_layers(config, len(layers))
    return with_dense_layers(layers, config.integer("intermediate_size"), dense)
