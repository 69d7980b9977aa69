"""Architectures with experts, or with latent attention: config.json from the keys of a .gguf file."""

from __future__ import annotations

from triptych.checkpoint.gguf.dense import granite, phi3
from triptych.checkpoint.gguf.keys import (
    Config,
    GgufModel,
    all_biases,
    attention,
    by_type,
    expect_gating,
    expect_normalised_weights,
    experts,
    granite_factors,
    layer_types,
    layers_without_experts,
    leading_dense,
    named,
    pass_over_images,
    qkv_bias,
    read_rope,
    shortest_float32,
)
from triptych.errors import ModelError


def llama4(model: GgufModel) -> Config:
    keys = model.keys
    config = attention(model) | {"attention_bias": False}
    keys.expect("attention.sliding_window", None, otherwise="layers see everything")
    moe_layers = model.layers_with("ffn_gate_inp.weight")
    return (
        named("Llama4ForCausalLM")
        | config
        | {
            **experts(model, "num_local_experts", width="intermediate_size"),
            "intermediate_size_mlp": config["intermediate_size"],
            "moe_layers": moe_layers,
            # of 48 layers only those of Scout's size have norms of queries and keys
            "use_qk_norm": keys.values.get("expert_count") != 128,
        }
    )


def qwen2_moe(model: GgufModel) -> Config:
    width = model.keys.integer("expert_shared_feed_forward_length")
    return (
        named("Qwen2MoeForCausalLM")
        | attention(model)
        | experts(model, "num_experts")
        | {
            "shared_expert_intermediate_size": width,
            "norm_topk_prob": False,
            "qkv_bias": model.has_all("attn_q", "attn_k", "attn_v"),
            "mlp_only_layers": layers_without_experts(model),
        }
    )


def qwen3_moe(model: GgufModel) -> Config:
    return (
        named("Qwen3MoeForCausalLM")
        | attention(model)
        | experts(model, "num_experts")
        | all_biases(model)
        | {
            "norm_topk_prob": True,
            "mlp_only_layers": layers_without_experts(model),
        }
    )


def qwen3_vl_moe(model: GgufModel) -> Config:
    pass_over_images(model)
    return qwen3_moe(model)


def phimoe(model: GgufModel) -> Config:
    config = phi3(model) | named("PhimoeForCausalLM")
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        rope |= {"short_mscale": rope["attention_factor"], "long_mscale": rope["attention_factor"]}
    return (
        config
        | experts(model, "num_local_experts", width="intermediate_size")
        | {
            "attention_bias": model.has_all("attn_q", "attn_k", "attn_v", "attn_output"),
            "lm_head_bias": "output.bias" in model.tensors,
        }
    )


def olmoe(model: GgufModel) -> Config:
    config = attention(model) | experts(model, "num_experts", width="intermediate_size")
    return named("OlmoeForCausalLM", norm_topk_prob=False) | config


def granite_moe(model: GgufModel) -> Config:
    width = model.keys.integer("expert_shared_feed_forward_length", default=0, minimum=0)
    name = "GraniteMoeSharedForCausalLM" if width else "GraniteMoeForCausalLM"
    config = attention(model) | experts(model, "num_local_experts", width="intermediate_size")
    shared = {"shared_intermediate_size": width or None}
    return named(name) | config | granite_factors(model) | all_biases(model) | shared


def granite_windows(model: GgufModel) -> Config:
    """Describe Granite with windows, in which layers have the rotary embedding, or no positions."""
    keys, rotated = model.keys, model.flags("attention.rope_pattern", default=[True] * model.num_layers)
    has_experts = keys.integer("expert_count", default=0, minimum=0) > 0
    config = granite_moe(model) if has_experts else granite(model)
    theta = config["rope_parameters"]["rope_theta"]
    keys.assume(**{"attention.sliding_window_pattern": [index % 4 > 0 for index in range(model.num_layers)]})
    return (
        config
        | named("GraniteMoeSWAForCausalLM" if has_experts else "GraniteSWAForCausalLM")
        | layer_types(model)
        | {"layer_rope_theta": [theta if is_rotated else 0 for is_rotated in rotated]}
    )


def _grouped_experts(model: GgufModel) -> Config:
    """Return a mixture under DeepSeek's keys, in all layers but the first."""
    shared = model.keys.integer("expert_shared_count", default=0, minimum=0)
    layers = {"n_shared_experts": shared, "first_k_dense_replace": leading_dense(model)}
    return experts(model, "n_routed_experts") | _groups(model) | layers


def _groups(model: GgufModel) -> Config:
    keys = model.keys
    return {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_group": keys.integer("expert_group_count", default=1),
        "topk_group": keys.integer("expert_group_used_count", default=1),
        "routed_scaling_factor": model.number("expert_weights_scale", default=1.0) or 1.0,
        "norm_topk_prob": keys.boolean("expert_weights_norm", default=False),
    }


def afmoe(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    expect_normalised_weights(model)
    keys = model.keys
    return (
        named("AfmoeForCausalLM", mup_enabled=True)  # llama.cpp scales each embedding
        | attention(model)
        | {"sliding_window": None}
        | layer_types(model, every=4)
        | experts(model, "num_experts")
        | {
            "num_shared_experts": keys.integer("expert_shared_count", minimum=0),
            "num_dense_layers": leading_dense(model),
            "route_scale": model.number("expert_weights_scale", default=1.0),
        }
    )


def cohere2_moe(model: GgufModel) -> Config:
    keys = model.keys
    keys.expect("expert_shared_count", None, otherwise="shared experts and others are averaged")
    eps = "rms_norm_eps" if keys.has("attention.layer_norm_rms_epsilon") else "layer_norm_eps"
    config = attention(model, eps=eps) | layer_types(model)
    return (
        named("Cohere2MoeForCausalLM")
        | config
        | experts(model, "num_experts", width="intermediate_size")
        | all_biases(model)
        | {
            "prefix_dense_intermediate_size": config["intermediate_size"],
            "first_k_dense_replace": leading_dense(model),
            "expert_selection_fn": _gating(model, {1: "softmax", 2: "sigmoid"}, default=1),
            "norm_topk_prob": keys.boolean("expert_weights_norm", default=False),
            "logit_scale": model.number("logit_scale"),
        }
    )


def _gating(model: GgufModel, names: dict[int, str], *, default: int) -> str:
    """Return the name of the router's function, given those that a family has by number."""
    number = model.keys.integer("expert_gating_func", default=default)
    if number not in names:
        model.keys.fail("expert_gating_func", number, f"must be one of {', '.join(map(str, names))}")
    return names[number]


def hunyuan3(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    expect_normalised_weights(model)
    keys = model.keys
    mixture = experts(model, "num_experts")
    shared, width = keys.integer("expert_shared_feed_forward_length"), mixture["moe_intermediate_size"]
    if shared % width:
        keys.fail("expert_shared_feed_forward_length", shared, f"must be a multiple of {width}, an expert's")
    return (
        named("HYV3ForCausalLM")
        | attention(model)
        | mixture
        | {
            "num_shared_experts": shared // width,
            "first_k_dense_replace": leading_dense(model),
            "router_scaling_factor": model.number("expert_weights_scale", default=1.0),
        }
    )


def laguna(model: GgufModel) -> Config:
    """Describe Laguna, in which every fourth layer from the first on sees everything, and gates are by head or not."""
    expect_gating(model, 2, "a sigmoid")
    expect_normalised_weights(model)
    keys = model.keys
    heads, head_dim = model.per_layer("attention.head_count"), model.head_dim
    keys.assume(**{"attention.sliding_window_pattern": [index % 4 > 0 for index in range(model.num_layers)]})
    types = layer_types(model)
    for kind in set(types["layer_types"]):
        of_kind = {number for number, own in zip(heads, types["layer_types"], strict=True) if own == kind}
        if len(of_kind) > 1:
            keys.fail("attention.head_count", heads, f"must be one number for all layers of {kind}")
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", default=10000.0)}
    rotated = keys.integer("rope.dimension_count_swa", default=head_dim)
    ropes = by_type(types, read_rope(model, head_dim), local | {"partial_rotary_factor": rotated / head_dim})
    gates = {
        model.tensors[f"blk.{index}.attn_gate.weight"].shape[0] == heads[index]
        for index in model.layers_with("attn_gate.weight")
    }
    if len(gates) != 1:
        raise ModelError(f"{keys.path}: attn_gate: all layers must have one, of heads or of elements")
    return (
        named("LagunaForCausalLM", norm_topk_prob=True)
        | attention(model, rope=ropes, heads=max(heads))
        | types
        | experts(model, "num_experts")
        | {
            "gating": "per-head" if gates == {True} else "per-element",
            "num_attention_heads_per_layer": heads,
            "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
            "moe_routed_scaling_factor": model.number("expert_weights_scale", default=1.0),
            "mlp_layer_types": _mlp_types(model),
        }
    )


def mellum(model: GgufModel) -> Config:
    types = layer_types(model)
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", default=10000.0)}
    return (
        named("MellumForCausalLM", norm_topk_prob=True)
        | attention(model, rope=by_type(types, read_rope(model, model.head_dim), local))
        | types
        | experts(model, "num_experts")
        | all_biases(model)
        | {"mlp_layer_types": _mlp_types(model)}
    )


def _mlp_types(model: GgufModel) -> list[str]:
    """Return which layers have experts, under the names of config.json."""
    is_dense = layers_without_experts(model)
    return ["dense" if index in is_dense else "sparse" for index in range(model.num_layers)]


def exaone_moe(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    keys, groups = model.keys, _groups(model)
    num_shared = keys.integer("expert_shared_count")
    keys.expect(
        "expert_shared_feed_forward_length",
        num_shared * groups["moe_intermediate_size"],
        otherwise="the shared expert is not as wide as expert_shared_count others",
    )
    return (
        named("ExaoneMoeForCausalLM")
        | attention(model)
        | {"sliding_window": None}
        | layer_types(model, every=4)
        | experts(model, "num_experts")
        | groups
        | {
            "num_shared_experts": num_shared,
            "mlp_layer_types": _mlp_types(model),
        }
    )


def glm4_moe(model: GgufModel) -> Config:
    """Describe GLM 4.5, or Solar Open, which has experts in all layers and rotates whole heads."""
    expect_gating(model, 2, "a sigmoid")
    keys = model.keys
    keys.assume(feed_forward_length=keys.values.get("expert_feed_forward_length"))  # Solar Open has no other
    config = attention(model)
    config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return (
        named("Glm4MoeForCausalLM")
        | config
        | _grouped_experts(model)
        | qkv_bias(model)
        | {
            "use_qk_norm": bool(model.layers_with("attn_q_norm.weight")),
            "num_nextn_predict_layers": 0,
        }
    )


def dots1(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    config = attention(model) | _grouped_experts(model) | all_biases(model)
    return (
        named("Dots1ForCausalLM")
        | config
        | {"sliding_window": None, "layer_types": ["full_attention"] * model.num_layers}
    )


def minimax_m2(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    config = attention(model) | experts(model, "num_local_experts", width="intermediate_size")
    rotary = model.keys.integer("rope.dimension_count", default=model.head_dim)
    return named("MiniMaxM2ForCausalLM", rotary_dim=rotary) | config


def gpt_oss(model: GgufModel) -> Config:
    config = attention(model) | experts(model, "num_local_experts", width="intermediate_size")
    config["rope_parameters"] |= {"truncate": False}
    return named("GptOssForCausalLM") | config | layer_types(model, every=2) | all_biases(model)


def deepseek2(model: GgufModel) -> Config:
    keys = model.keys
    rope_dim = keys.integer("rope.dimension_count")
    head_dim = keys.integer("attention.key_length_mla", default=keys.integer("attention.key_length"))
    rope = read_rope(model, rope_dim)
    log_multiplier = model.number("rope.scaling.yarn_log_multiplier", default=0.0)
    if rope["rope_type"] == "yarn":
        # llama.cpp keeps the factor of both; checkpoints have the same for both
        rope |= {
            "mscale": shortest_float32(10 * log_multiplier),
            "mscale_all_dim": shortest_float32(10 * log_multiplier),
        }
        rope.pop("attention_factor", None)
    has_correction = bool(model.layers_with("exp_probs_b.bias") or model.layers_with("exp_probs_b"))
    if has_correction:
        expect_gating(model, 2, "a sigmoid")
    else:
        expect_gating(model, 1, "a softmax")
    keys.expect("attention.temperature_scale", None, otherwise="queries are scaled by their position")
    config = {
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", default=0, minimum=0) or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": keys.integer(
            "attention.value_length_mla", default=keys.integer("attention.value_length")
        ),
    }
    keys.pass_over("expert_shared_feed_forward_length")
    widths = {width for width in model.per_layer("feed_forward_length") if width}
    config |= {"intermediate_size": max(widths, default=None)}
    if not model.layers_with("ffn_gate_inp.weight"):
        keys.pass_over("expert_feed_forward_length", "expert_shared_count")
        return named("YoutuForCausalLM") | config | {"rope_interleave": True}
    mixture = _grouped_experts(model)
    if has_correction:
        return named("DeepseekV3ForCausalLM") | config | mixture
    groups = {"topk_method": "group_limited_greedy" if mixture["n_group"] > 1 else "greedy"}
    return named("DeepseekV2ForCausalLM") | config | mixture | groups


def deepseek32(model: GgufModel) -> Config:
    """Describe DeepSeek V3.2: V3 with an indexer in each layer."""
    return _choosing(model, "DeepseekV32ForCausalLM")


def glm_dsa(model: GgufModel) -> Config:
    """Describe GLM 5, of which some layers have no indexer: by a list, or else by the tensors."""
    has_own = model.layers_with("indexer.attn_k.weight")
    default = [index in has_own for index in range(model.num_layers)]
    listed = model.flags("attention.indexer.types", default=default)
    types = ["full" if is_full else "shared" for is_full in listed]
    return _choosing(model, "GlmMoeDsaForCausalLM") | {"indexer_types": types}


def _choosing(model: GgufModel, architecture: str) -> Config:
    """Return DeepSeek V3's keys and those of an indexer."""
    keys, config = model.keys, deepseek2(model)
    if "DeepseekV3ForCausalLM" not in config["architectures"]:
        raise ModelError(
            f"{keys.path}: exp_probs_b: no layer has one, which {architecture} needs for its experts"
        )
    return (
        config
        | named(architecture)
        | {
            "index_n_heads": keys.integer("attention.indexer.head_count"),
            "index_head_dim": keys.integer("attention.indexer.key_length"),
            "index_topk": keys.integer("attention.indexer.top_k"),
        }
    )


def minicpm3(model: GgufModel) -> Config:
    keys = model.keys
    rope_dim = keys.integer("rope.dimension_count")
    heads = keys.integer("attention.head_count")
    return named("MiniCPM3ForCausalLM") | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(model, rope_dim),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.integer("attention.key_length") - rope_dim,
        # what llama.cpp has in its code for the only checkpoint of this family
        "dim_model_base": 256,
        "scale_emb": 12,
        "scale_depth": 1.4,
    }


def ernie_moe(model: GgufModel) -> Config:
    keys, layers = model.keys, model.layers_with("ffn_gate_inp.weight")
    has_biases = model.has_all("attn_q", "attn_k", "attn_v", "attn_output")
    if not layers:
        raise ModelError(f"{keys.path}: no layer has experts")
    width = keys.integer("expert_feed_forward_length")
    shared = {
        width
        for name, info in model.tensors.items()
        if name.endswith("ffn_up_shexp.weight")
        for width in info.shape[:1]
    }
    keys.pass_over("expert_shared_feed_forward_length", "expert_shared_count")
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if layers != list(range(layers[0], layers[-1] + 1, step)):
        raise ModelError(f"{keys.path}: layers {layers} have experts, which is no range")
    return (
        named("Ernie4_5_MoeForCausalLM", use_bias=has_biases)
        | attention(model)
        | {
            **experts(model, "moe_num_experts", "moe_k"),
            "moe_num_shared_experts": max(shared, default=0) // width,
            "moe_layer_start_index": layers[0],
            "moe_layer_end_index": layers[-1],
            "moe_layer_interval": step,
        }
    )


def hunyuan_moe(model: GgufModel) -> Config:
    keys = model.keys
    config = attention(model) | all_biases(model)
    keys.expect("expert_shared_count", 1, otherwise="there are several shared experts")
    keys.pass_over("expert_shared_feed_forward_length")
    return (
        named("HunYuanMoEV1ForCausalLM")
        | config
        | experts(model, "num_experts", "moe_topk", "intermediate_size")
    )
