"""Architectures with recurrent states, beside attention or alone: config.json from the keys of a .gguf file."""

from __future__ import annotations

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.gguf.keys import (
    Config,
    GgufModel,
    attention,
    expect_gating,
    experts,
    granite_factors,
    layers_without_experts,
    leading_dense,
    named,
    pass_over_images,
)
from triptych.errors import ModelError


def mamba(model: GgufModel) -> Config:
    keys = model.keys
    keys.expect("ssm.dt_b_c_rms", False, otherwise="step sizes, B and C are normalised")
    keys.pass_over("attention.head_count")
    return named("MambaForCausalLM") | {
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "expand": _ratio(keys, "ssm.inner_size", "embedding_length"),
        "time_step_rank": keys.integer("ssm.time_step_rank"),
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": bool(model.layers_with("ssm_conv1d.bias")),
        "use_bias": model.has_all("ssm_in", "ssm_out"),
    }


def _ratio(keys: ConfigFile, key: str, of: str) -> int:
    value, divisor = keys.integer(key), keys.integer(of)
    if value % divisor:
        keys.fail(key, value, f"must be a multiple of {of} {divisor}")
    return value // divisor


def mamba2(model: GgufModel) -> Config:
    keys = model.keys
    keys.pass_over("attention.head_count")
    return named("Mamba2ForCausalLM") | {
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "expand": _ratio(keys, "ssm.inner_size", "embedding_length"),
        "num_heads": keys.integer("ssm.time_step_rank"),
        "head_dim": _ratio(keys, "ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": keys.integer("ssm.group_count"),
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": bool(model.layers_with("ssm_conv1d.bias")),
        "use_bias": model.has_all("ssm_in", "ssm_out"),
    }


def _mamba_of_hybrid(model: GgufModel) -> Config:
    """Return the sizes of Mamba 2 layers beside attention."""
    keys = model.keys
    return {
        "mamba_n_heads": keys.integer("ssm.time_step_rank"),
        "mamba_d_head": _ratio(keys, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": bool(model.layers_with("ssm_conv1d.bias")),
        "mamba_proj_bias": model.has_all("ssm_in", "ssm_out"),
    }


def granite_hybrid(model: GgufModel) -> Config:
    keys, config = model.keys, attention(model)
    is_attention = model.layers_with("attn_q.weight")
    kinds = ["attention" if index in is_attention else "mamba" for index in range(model.num_layers)]
    num_experts = keys.integer("expert_count", default=0, minimum=0)
    width = keys.integer("expert_shared_feed_forward_length", default=config["intermediate_size"])
    has_rope = keys.boolean("rope.scaling.finetuned", default=True)
    kv_heads = next((model.tensors[f"blk.{index}.attn_k.weight"].shape[0] for index in is_attention), 0)
    config["num_key_value_heads"] = kv_heads // model.head_dim or None
    mixture = (
        experts(model, "num_local_experts", width="intermediate_size")
        if num_experts
        else {"num_local_experts": 0}
    )
    return (
        named("GraniteMoeHybridForCausalLM")
        | config
        | mixture
        | granite_factors(model)
        | {
            **_mamba_of_hybrid(model),
            "mamba_expand": _ratio(keys, "ssm.inner_size", "embedding_length"),
            "layers_block_type": kinds,
            "shared_intermediate_size": width,
            "position_embedding_type": "rope" if has_rope else "nope",
            "attention_bias": model.has_all("attn_q", "attn_k", "attn_v", "attn_output"),
        }
    )


def jamba(model: GgufModel) -> Config:
    keys, config = model.keys, attention(model, rope={})
    period, offset = _every(model, model.layers_with("attn_q.weight"))
    expert_period, expert_offset = _every(model, model.layers_with("ffn_gate_inp.weight"))
    del config["rope_parameters"]
    return (
        named("JambaForCausalLM")
        | config
        | {
            "attn_layer_period": period,
            "attn_layer_offset": offset,
            "expert_layer_period": expert_period,
            "expert_layer_offset": expert_offset,
            "num_experts": keys.integer("expert_count", default=1),
            "num_experts_per_tok": keys.integer("expert_used_count", default=1),
            "mamba_d_state": keys.integer("ssm.state_size"),
            "mamba_d_conv": keys.integer("ssm.conv_kernel"),
            "mamba_dt_rank": keys.integer("ssm.time_step_rank"),
            "mamba_expand": _ratio(keys, "ssm.inner_size", "embedding_length"),
            "mamba_conv_bias": bool(model.layers_with("ssm_conv1d.bias")),
            "mamba_proj_bias": model.has_all("ssm_in", "ssm_out"),
        }
    )


def _every(model: GgufModel, layers: list[int]) -> tuple[int, int]:
    """Return (period, first) of layers that recur.

    Raises:
        ModelError: They do not.
    """
    period = layers[1] - layers[0] if len(layers) > 1 else model.num_layers
    first = layers[0] if layers else 0
    if not layers or layers != list(range(first, model.num_layers, period)) or first >= period:
        raise ModelError(f"{model.keys.path}: layers {layers} of a kind do not recur, which is not supported")
    return period, first


def lfm2(model: GgufModel) -> Config:
    keys, config = model.keys, attention(model, eps="norm_eps")
    is_attention = model.layers_with("attn_q.weight")
    kinds = ["full_attention" if index in is_attention else "conv" for index in range(model.num_layers)]
    return (
        named("Lfm2ForCausalLM")
        | config
        | {
            "layer_types": kinds,
            "conv_L_cache": keys.integer("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
            "conv_bias": bool(model.layers_with("shortconv.in_proj.bias")),
        }
    )


def lfm2_moe(model: GgufModel) -> Config:
    expect_gating(model, 2, "a sigmoid")
    has_correction = bool(model.layers_with("exp_probs_b.bias"))
    config = lfm2(model) | experts(model, "num_experts")
    del config["block_auto_adjust_ff_dim"]  # of the MLP in layers of the dense models
    return config | named(
        "Lfm2MoeForCausalLM", use_expert_bias=has_correction, num_dense_layers=leading_dense(model)
    )


def qwen3_next(model: GgufModel) -> Config:
    config = _gated_delta(model)
    if not model.layers_with("ffn_gate_inp.weight"):
        return named("Qwen3NextForCausalLM", num_experts=0) | config
    only_mlps = {"mlp_only_layers": layers_without_experts(model)}
    return named("Qwen3NextForCausalLM") | config | _experts_beside_shared(model) | only_mlps


def qwen3_5(model: GgufModel) -> Config:
    pass_over_images(model)
    return named("Qwen3_5ForCausalLM") | _gated_delta(model)


def qwen3_5_moe(model: GgufModel) -> Config:
    return qwen3_5(model) | named("Qwen3_5MoeForCausalLM") | _experts_beside_shared(model)


def _gated_delta(model: GgufModel) -> Config:
    """Return the sizes of attention beside gated delta nets."""
    keys = model.keys
    is_attention = model.layers_with("attn_q.weight")
    kinds = [
        "full_attention" if index in is_attention else "linear_attention" for index in range(model.num_layers)
    ]
    keys.pass_over("full_attention_interval", "attention.recurrent_layers", "recurrent_layers")
    return attention(model) | {
        "layer_types": kinds,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": _multiple(keys, "ssm.time_step_rank", "ssm.group_count"),
        "linear_value_head_dim": _ratio(keys, "ssm.inner_size", "ssm.time_step_rank"),
    }


def _multiple(keys: ConfigFile, key: str, of: str) -> int:
    return _ratio(keys, key, of) * keys.integer(of)


def _experts_beside_shared(model: GgufModel) -> Config:
    shared_size = model.keys.integer("expert_shared_feed_forward_length")
    return experts(model, "num_experts") | {
        "shared_expert_intermediate_size": shared_size,
        "norm_topk_prob": True,
    }


def falcon_h1(model: GgufModel) -> Config:
    keys, config = model.keys, attention(model)
    # the converter multiplies the weights by the other factors
    has_norm = bool(model.layers_with("ssm_norm.weight"))
    return (
        named("FalconH1ForCausalLM")
        | config
        | _mamba_of_hybrid(model)
        | {
            "mamba_d_ssm": keys.integer("ssm.inner_size"),
            "mamba_rms_norm": has_norm,
            "mamba_norm_before_gate": False,
            "attention_bias": model.has_all("attn_q", "attn_k", "attn_v", "attn_output"),
            "mlp_bias": model.has_all("ffn_gate", "ffn_up", "ffn_down"),
        }
    )


_NEMOTRON_STEMS = {"attention": "attn_q.weight", "mamba": "ssm_in.weight", "moe": "ffn_gate_inp.weight"}
"""Kind of a layer -> the tensor that tells it; others are MLPs."""


def nemotron_h(model: GgufModel) -> Config:
    keys = model.keys
    kinds = [
        next((kind for kind, stem in _NEMOTRON_STEMS.items() if index in model.layers_with(stem)), "mlp")
        for index in range(model.num_layers)
    ]
    mixture = _nemotron_experts(model) if "moe" in kinds else {}
    keys.pass_over(*(key for key in keys.values if key.startswith("expert_")), "rope.dimension_count")
    config = attention(model, eps="layer_norm_epsilon", rope={})
    width = next(
        (info.shape[0] for name, info in model.tensors.items() if name.endswith(".ffn_up.weight")), None
    )
    del config["rope_parameters"]
    return (
        named("NemotronHForCausalLM")
        | config
        | {
            "intermediate_size": width
            or mixture.get("moe_intermediate_size"),  # nothing reads it without an MLP
            "layers_block_type": kinds,
            "mamba_num_heads": keys.integer("ssm.time_step_rank"),
            "mamba_head_dim": _ratio(keys, "ssm.inner_size", "ssm.time_step_rank"),
            "n_groups": keys.integer("ssm.group_count"),
            "ssm_state_size": keys.integer("ssm.state_size"),
            "conv_kernel": keys.integer("ssm.conv_kernel"),
            "use_conv_bias": bool(model.layers_with("ssm_conv1d.bias")),
            "time_step_min": 0.0,
        }
        | mixture
    )


def _nemotron_experts(model: GgufModel) -> Config:
    keys = model.keys
    latent_size = keys.integer("moe_latent_size", default=0, minimum=0)
    if not latent_size and model.layers_with("ffn_latent_down.weight"):
        keys.fail("moe_latent_size", None, "must be the rows of ffn_latent_down")
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_group": keys.integer("expert_group_count", default=1),
        "topk_group": keys.integer("expert_group_used_count", default=1),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", default=True),
        "routed_scaling_factor": model.number("expert_weights_scale", default=1.0),
        "moe_latent_size": latent_size or None,
    }
