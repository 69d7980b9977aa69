"""A tiny config of transformers for each family with recurrent states."""

from __future__ import annotations

from tests.worker.models.families import FOUR, FULL, SLIDING, WINDOW, Tiny, rope

LINEAR = "linear_attention"
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 8,
}
# transformers saves the convolution of OLMo Hybrid in three equal parts, which fits keys as long as values only
OWN_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
LFM3 = {"head_dim": 16, **OWN_TOKENS}
SHARED = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "experts_implementation": "eager",
}
NO_ATTENTION = {
    key: value for key, value in FOUR.items() if key in ("vocab_size", "hidden_size", "num_hidden_layers")
}

LISTED_LAYERS = {key: value for key, value in FOUR.items() if key != "num_hidden_layers"}
NEMOTRON_EXPERTS = {
    "head_dim": 8,
    "layers_block_type": [LINEAR, "moe", FULL, "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}

RECURRENT_FAMILIES: dict[str, Tiny] = {
    "Bamba": Tiny(
        "bamba", {**MAMBA, "attn_layer_indices": [1], **rope("default", partial_rotary_factor=0.5)}
    ),
    "Falcon-H1": Tiny(
        "falcon_h1",
        {
            **MAMBA,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.7, 1.5],
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.25,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.4,
        },
    ),
    "Falcon-H1, norm": Tiny(
        "falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "Granite 4": Tiny(
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.3,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
            "experts_implementation": "eager",
        },
    ),
    "Granite 4, dense": Tiny(
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 56,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        },
    ),
    "Jamba": Tiny(
        "jamba",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
            "experts_implementation": "eager",
        },
    ),
    "LFM2": Tiny("lfm2", {"layer_types": ["conv", FULL, "conv", "conv"], "block_multiple_of": 8}),
    "LFM2, biases": Tiny(
        "lfm2",
        {
            "layer_types": ["conv", FULL, "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 5,
        },
    ),
    "LFM2, experts": Tiny(
        "lfm2_moe",
        {
            "layer_types": ["conv", FULL, "conv", FULL],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
            "experts_implementation": "eager",
        },
    ),
    "LFM3": Tiny(
        "lfm3",
        {
            **LFM3,
            "sliding_window": WINDOW,
            "layer_types": ["conv", SLIDING, FULL, "conv"],
        },
    ),
    "LFM3, no gate": Tiny(
        "lfm3",
        {
            **LFM3,
            "conv_bias": True,
            "conv_L_cache": 3,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "layer_types": ["conv", FULL, "conv", FULL],
        },
    ),
    "Mamba": Tiny("mamba", {"state_size": 6, "time_step_rank": 5, "use_bias": True}, NO_ATTENTION),
    "Mamba 2": Tiny(
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 10, "chunk_size": 8},
        NO_ATTENTION,
    ),
    "Nemotron-H": Tiny(
        "nemotron_h",
        {
            "head_dim": 8,
            "layers_block_type": [LINEAR, "mlp", FULL, LINEAR],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 10,
            "chunk_size": 8,
        },
        LISTED_LAYERS,
    ),
    "Nemotron-H, experts": Tiny(
        "nemotron_h", {**NEMOTRON_EXPERTS, "n_group": 4, "topk_group": 2}, LISTED_LAYERS
    ),
    "Nemotron-H, latent experts": Tiny(
        "nemotron_h", {**NEMOTRON_EXPERTS, "moe_latent_size": 16}, LISTED_LAYERS
    ),
    "Qwen3-Next": Tiny("qwen3_next", {**DELTA, **SHARED, "mlp_only_layers": [1]}),
    "Qwen 3.5": Tiny(
        "qwen3_5_text", {**DELTA, **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])}
    ),
    "OLMo Hybrid": Tiny(
        "olmo_hybrid",
        {
            **OWN_TOKENS,
            "linear_key_head_dim": 21,
            "linear_value_head_dim": 7,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        },
    ),
    "OLMo Hybrid, no positions": Tiny(
        "olmo_hybrid",
        {
            **OWN_TOKENS,
            "layer_types": [FULL, LINEAR, LINEAR, FULL],
            "linear_value_head_dim": 6,
            "linear_allow_neg_eigval": False,
            "rms_norm_eps": 1e-3,
            **rope("default", rope_theta=None),
        },
    ),
    "Qwen3-Next, dense": Tiny("qwen3_next", {**DELTA, "num_experts": 0}),
    "Qwen 3.5 MoE": Tiny("qwen3_5_moe_text", {**DELTA, **SHARED}),
}
