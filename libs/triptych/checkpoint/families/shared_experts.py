"""Families with a mixture in which every token goes through an expert that all share: AFMoE, Dots 1, Ernie 4.5,
GLM 4.5, Granite, Hunyuan, K-EXAONE, Llama 4, Solar Open.
"""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import EndsSpec, ModelArchitecture, NormSpec
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    CHUNKED,
    FULL,
    SLIDING,
    describe,
    describe_layers,
    read_dense_layers,
    read_experts,
    read_grouped_experts,
    read_layer_types,
    read_rope,
    read_sizes,
    read_window,
    stacked_experts,
    with_dense_layers,
)
from triptych.checkpoint.families.llama import (
    HUNYUAN_NAMES,
    exaone_layers,
    granite_layers,
    granite_multipliers,
    has_granite_windows,
    hunyuan_block,
    read_hunyuan_rope,
    rms_block,
)
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames


def afmoe(config: ConfigFile) -> ModelArchitecture:
    """Read Trinity: gated attention with norms on both sides, in which only layers with a window have positions."""
    config.assume(head_dim=128, sliding_window=1024)
    config.assume(num_experts=64, num_experts_per_tok=6, num_shared_experts=2, moe_intermediate_size=1408)
    sizes = read_sizes(config, default_positions=16384)
    config.expect("score_func", "sigmoid", otherwise="the router scores in another way")
    config.expect(
        "route_norm", True, otherwise="the weights of a token's experts are not divided by their sum"
    )
    config.expect("attention_bias", False, otherwise="the attention has biases")
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.expect(key, 1, otherwise="experts are chosen by groups")
    config.pass_over("load_balance_coeff", "use_grouped_mm")
    every = config.integer("global_attn_every_n_layers", default=4)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if (index + 1) % every else FULL
    )
    rope, width = read_rope(config, sizes), config.integer("moe_intermediate_size")
    experts = read_experts(config, "num_experts")
    experts = replace(
        experts,
        score="sigmoid",
        scale=config.positive("route_scale", default=1.0),
        correction_shape=(experts.num_experts,),
        shared_size=width * config.integer("num_shared_experts", minimum=0),
    )
    layers = describe_layers(
        sizes,
        intermediate_size=width,
        rope=lambda index, kind: rope if kind == SLIDING else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=experts,
    )
    num_dense = config.integer("num_dense_layers", default=1, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    block = replace(rms_block(config, eps=1e-5), norms="both", qk_norm="head", output_gate="elements")
    is_scaled = config.boolean("mup_enabled", default=False)
    ends = EndsSpec(embedding_multiplier=sizes.hidden_size**0.5 if is_scaled else 1.0)
    names = TensorNames(
        renamed=(
            ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
            (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.gate.", ".mlp.router.gate."),
        )
    )
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names)


def dots1(config: ConfigFile) -> ModelArchitecture:
    config.assume(sliding_window=4096, max_window_layers=62)
    sizes = read_sizes(config)
    config.expect("scoring_func", "noaux_tc", otherwise="the router scores in another way")
    first = config.integer("max_window_layers", minimum=0)
    has_window = config.has("sliding_window")
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if has_window and index >= first else FULL
    )
    experts = read_grouped_experts(config, score="sigmoid")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=replace(experts, correction_shape=(experts.num_experts,)),
    )
    num_dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    bias = config.boolean("attention_bias", default=False)
    block = replace(rms_block(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    return describe(config, sizes, layers=layers, block=block)


def ernie_moe(config: ConfigFile) -> ModelArchitecture:
    config.assume(moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_intermediate_size=1536)
    sizes = read_sizes(config)
    # what training keeps, and the least sum of a token's weights, which a softmax does not come near
    config.pass_over("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "output_router_logits")
    experts = read_experts(config, "moe_num_experts", chosen="moe_k")
    width = config.integer("moe_intermediate_size")
    experts = replace(
        experts,
        correction_shape=(1, experts.num_experts),
        shared_size=width * config.integer("moe_num_shared_experts", minimum=0),
    )
    layers = describe_layers(
        sizes,
        intermediate_size=width,
        rope=read_rope(config, sizes, theta=500000.0, is_interleaved=True),
        experts=experts,
    )
    start = config.integer("moe_layer_start_index", default=1, minimum=0)
    end = config.integer("moe_layer_end_index", default=-1, minimum=-1)
    every = config.integer("moe_layer_interval", default=1)
    last = sizes.num_layers - 1 if end == -1 else end
    sparse = {index for index in range(start, last + 1) if (index + 1) % every == 0}
    dense = set(range(sizes.num_layers)) - sparse
    layers = with_dense_layers(layers, config.integer("intermediate_size"), dense)
    bias = config.boolean("use_bias", default=False)
    block = replace(rms_block(config, eps=1e-5), qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    names = TensorNames(renamed=((".mlp.gate.e_score", ".mlp.moe_statics.e_score"),))
    ends = EndsSpec(head_bias=bias)
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names, is_tied=True)


def exaone_moe(config: ConfigFile) -> ModelArchitecture:
    """Read EXAONE 4's attention beside a mixture, with norms before blocks."""
    config.assume(num_experts=64, num_shared_experts=1, routed_scaling_factor=2.5)
    sizes = read_sizes(config)
    config.expect("scoring_func", "sigmoid", otherwise="the router scores in another way")
    config.expect("topk_method", "noaux_tc", otherwise="the router chooses in another way")
    experts = read_grouped_experts(config, "num_experts", shared="num_shared_experts", score="sigmoid")
    layers = exaone_layers(
        config,
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        experts=replace(experts, correction_shape=(experts.num_experts,)),
    )
    older = "first_last_k_dense_replace"
    key = older if config.has(older) else "first_k_dense_replace"
    first = config.integer(key, default=1, minimum=0)
    dense = read_dense_layers(config, sizes.num_layers, first=first)
    has_experts = [index not in dense for index in range(sizes.num_layers)]
    if config.has("is_moe_layer") and config.values["is_moe_layer"] != has_experts:
        config.fail(
            "is_moe_layer", config.values["is_moe_layer"], "must name the layers that the other keys name"
        )
    # layers that predict further tokens have a beginning of their own
    config.pass_over("is_moe_layer", "num_nextn_predict_layers", "output_router_logits")
    layers = with_dense_layers(layers, config.integer("intermediate_size"), dense)
    block = replace(rms_block(config, eps=1e-5), qk_norm="head")
    names = TensorNames(renamed=((".mlp.gate.e_score", ".mlp.e_score"),), ignored_prefixes=("mtp.",))
    return describe(config, sizes, layers=layers, block=block, names=names)


def glm4_moe(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    experts = read_grouped_experts(config, score="sigmoid")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes, partial=0.5),
        experts=replace(experts, correction_shape=(experts.num_experts,)),
    )
    num_dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    has_norms = config.boolean("use_qk_norm", default=False)
    block = replace(
        rms_block(config, eps=1e-5),
        qk_norm="head" if has_norms else "none",
        qkv_bias=config.boolean("attention_bias", default=False),
    )
    # the layers behind the last one predict further tokens
    extra = config.integer("num_nextn_predict_layers", default=1, minimum=0)
    ignored = tuple(f"model.layers.{sizes.num_layers + index}." for index in range(extra))
    return describe(config, sizes, layers=layers, block=block, names=TensorNames(ignored_prefixes=ignored))


def solar_open(config: ConfigFile) -> ModelArchitecture:
    """Read GLM 4.5's mixture in every layer, beside Llama's attention."""
    config.assume(head_dim=128, n_routed_experts=128, n_shared_experts=1)
    sizes = read_sizes(config)
    config.expect("use_qk_norm", False, otherwise="queries and keys have norms")
    config.expect("first_k_dense_replace", 0, otherwise="the first layers have no mixture")
    config.pass_over("intermediate_size", "output_router_logits")
    experts = read_grouped_experts(config, score="sigmoid")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes, theta=1000000.0),
        experts=replace(experts, correction_shape=(experts.num_experts,)),
    )
    block = replace(rms_block(config, eps=1e-5), qkv_bias=config.boolean("attention_bias", default=False))
    return describe(config, sizes, layers=layers, block=block)


GRANITE_EXPERTS = (
    FusedTensor(
        "block_sparse_moe.input_linear", ("mlp.experts.gate_proj", "mlp.experts.up_proj"), of_experts=True
    ),
    FusedTensor("block_sparse_moe.output_linear", ("mlp.experts.down_proj",), of_experts=True),
)
"""Tensors of all experts of a layer in Granite's mixtures."""


def granite_moe(config: ConfigFile) -> ModelArchitecture:
    """Read a mixture with Granite's multipliers, with a shared expert or without one, and with windows or without."""
    sizes = read_sizes(config)
    experts = read_experts(config)
    if architecture_name(config) != "GraniteMoeForCausalLM":
        experts = replace(
            experts, shared_size=config.integer("shared_intermediate_size", default=0, minimum=0)
        )
    layers = granite_layers(
        config, sizes, intermediate_size=config.integer("intermediate_size"), experts=experts
    )
    block, ends = granite_multipliers(config)
    has_windows = has_granite_windows(config)  # their files have the names of transformers' modules
    router = ".block_sparse_moe.router." if has_windows else ".block_sparse_moe.router.layer."
    experts_of_file = stacked_experts("block_sparse_moe.experts") if has_windows else GRANITE_EXPERTS
    names = TensorNames(
        renamed=((".mlp.gate.", router), (".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear.")),
        fused=(
            *experts_of_file,
            FusedTensor(
                "shared_mlp.input_linear", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
            ),
        ),
    )
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names)


def hunyuan_moe(config: ConfigFile) -> ModelArchitecture:
    config.pass_over("eod_token_id", "sep_token_id", "pretraining_tp")
    sizes = read_sizes(config)
    width = config.integer("intermediate_size")
    for key in ("num_experts", "moe_topk"):
        if isinstance(values := config.values.get(key), list) and len(set(values)) != 1:
            config.fail(key, values, "must be one number for all layers")
    experts = replace(read_experts(config, "num_experts", chosen="moe_topk"), shared_size=width)
    layers = describe_layers(
        sizes, intermediate_size=width, rope=read_hunyuan_rope(config, sizes), experts=experts
    )
    names = TensorNames(
        renamed=(
            *HUNYUAN_NAMES,
            (".mlp.gate.", ".mlp.gate.wg."),
            (".shared_experts.", ".shared_mlp."),
        )
    )
    return describe(config, sizes, layers=layers, block=hunyuan_block(config, sizes), names=names)


def hunyuan3(config: ConfigFile) -> ModelArchitecture:
    """Read Hunyuan 3: a mixture by corrected sigmoids behind dense layers, beside attention with q/k norms."""
    config.assume(head_dim=128, num_experts=192, num_experts_per_tok=8, moe_intermediate_size=1536)
    sizes = read_sizes(config)
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        config.expect(key, True, otherwise="it is computed in another way")
    for key in ("attention_bias", "mlp_bias"):
        config.expect(key, False, otherwise="projections have biases")
    # how precisely sums are kept: here in float32 in any case
    config.pass_over("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax")
    width = config.integer("moe_intermediate_size")
    config.expect("expert_hidden_dim", width, otherwise="experts have two widths")
    experts = read_experts(config, "num_experts")
    experts = replace(
        experts,
        score="sigmoid",
        scale=config.positive("router_scaling_factor", default=2.826),
        correction_shape=(experts.num_experts,),
        shared_size=width * config.integer("num_shared_experts", default=1, minimum=0),
    )
    rope = read_rope(config, sizes, theta=11158840.0)
    layers = describe_layers(sizes, intermediate_size=width, rope=rope, experts=experts)
    first = config.integer("first_k_dense_replace", default=1, minimum=0)
    dense = read_dense_layers(config, sizes.num_layers, first=first)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), dense)
    names = TensorNames(
        renamed=(
            (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.gate.", ".mlp.router.gate."),
            (".shared_experts.", ".shared_mlp."),
        ),
        ignored_prefixes=(f"model.layers.{sizes.num_layers}.",),  # it predicts further tokens
    )
    config.pass_over("num_nextn_predict_layers")
    block = replace(rms_block(config, eps=1e-5), qk_norm="head")
    return describe(config, sizes, layers=layers, block=block, names=names)


def llama4(config: ConfigFile) -> ModelArchitecture:
    """Read Llama 4, in which layers with positions see chunks, and those without see everything."""
    config.assume(attention_chunk_size=8192, num_local_experts=16, num_experts_per_tok=1)
    config.pass_over("for_llm_compressor", "router_jitter_noise", "output_router_logits")
    sizes = read_sizes(config)
    interval = config.integer("no_rope_layer_interval", default=4)
    has_rope = [(index + 1) % interval != 0 for index in range(sizes.num_layers)]
    if config.values.get("no_rope_layers"):
        has_rope = [bool(flag) for flag in config.numbers("no_rope_layers", length=sizes.num_layers)]
    config.pass_over("no_rope_layers")
    layer_types = tuple(CHUNKED if flag else FULL for flag in has_rope)
    if config.has("layer_types"):
        layer_types = config.words("layer_types", length=sizes.num_layers, among=(CHUNKED, FULL))
    width = config.integer("intermediate_size")
    experts = replace(
        read_experts(config, renormalize=False), score="sigmoid", scales_input=True, shared_size=width
    )
    rope = read_rope(config, sizes, theta=500000.0, is_interleaved=True)
    layers = describe_layers(
        sizes,
        intermediate_size=width,
        rope=lambda index, kind: rope if has_rope[index] else None,
        layer_types=layer_types,
        window=config.integer("attention_chunk_size") if CHUNKED in layer_types else 0,
        experts=experts,
    )
    step = config.integer("interleave_moe_layer_step", default=1)
    sparse = frozenset(range(step - 1, sizes.num_layers, step))
    if config.has("moe_layers"):
        sparse = config.indices("moe_layers", length=sizes.num_layers)
    dense = set(range(sizes.num_layers)) - sparse
    layers = with_dense_layers(layers, config.integer("intermediate_size_mlp"), dense)
    eps = config.number("rms_norm_eps", default=1e-5)
    bias = config.boolean("attention_bias", default=False)
    scaling = (config.number("attn_scale", default=0.1), config.integer("floor_scale", default=8192))
    block = replace(
        rms_block(config, eps=1e-5),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head" if config.boolean("use_qk_norm", default=True) else "none",
        qk_norm_spec=NormSpec(eps=eps, weight=False),
        qk_norm_after_rope=True,
        qk_norm_needs_rope=True,
        query_scaling=scaling if _is_on(config, "attn_temperature_tuning") else None,
        scales_queries_without_rope=True,
    )
    return describe(config, sizes, layers=layers, block=block, names=_LLAMA4_NAMES)


_LLAMA4_NAMES = TensorNames(
    renamed=(
        (".mlp.gate.", ".feed_forward.router."),
        (".shared_experts.", ".shared_expert."),
        (".mlp.", ".feed_forward."),
    ),
    fused=stacked_experts("feed_forward.experts", is_transposed=True),
)


def _is_on(config: ConfigFile, key: str) -> bool:
    """Read a switch that older files write as a number."""
    value = config.values.get(key, True)
    config.pass_over(key)
    if not isinstance(value, int):
        config.fail(key, value, "must be a boolean or a number")
    return bool(value)
