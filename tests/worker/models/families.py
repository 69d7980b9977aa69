"""A tiny config of transformers for each family, with what its files may say and the default does not.

That is: odd sizes, patterns that alternate within four layers, windows that are crossed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.worker.models.checkpoints import SIZES

FOUR = {**SIZES, "num_hidden_layers": 4}
HEADS_ALIKE = {key: value for key, value in FOUR.items() if key != "num_key_value_heads"}
NO_MLP = {key: value for key, value in HEADS_ALIKE.items() if key != "intermediate_size"}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 56,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LATENT = {
    **HEADS_ALIKE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 6
"""Crossed by the longer sequences, and no multiple of a block."""


@dataclass(frozen=True)
class Tiny:
    """A family, or one form of it."""

    model_type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: FOUR)
    class_name: str = ""
    """The class, where transformers' table has none for the type."""

    def config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.model_type](**{**self.sizes, **self.arguments})

    def create(self) -> Any:
        """A model of transformers."""
        if self.class_name:
            return getattr(transformers, self.class_name)._from_config(self.config(), dtype=torch.float32)
        return AutoModelForCausalLM.from_config(self.config(), dtype="float32")


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0)
MSCALED = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=0.7,
    mscale_all_dim=1.3,
)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.5, 2.0, 2.5],
    long_factor=[1.5, 2.0, 3.0, 4.0],
    original_max_position_embeddings=16,
)

DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
COHERE_EXPERTS = {
    "head_dim": 10,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "logit_scale": 0.5,
}
GRANITE_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_rope_theta": [0, 1000.0, 500.0, 0],
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
OF_TYPES: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "sliding_window": WINDOW,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "rope_parameters": {
        FULL: YARN["rope_parameters"],
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
}
INDEXER = {"index_topk": 7, "index_n_heads": 12, "index_head_dim": 10}
"""Few keys, and heads enough that scores of 0, which several keys would share, are rare: `test_chosen_keys`."""

GEMMA4 = {
    "head_dim": 10,
    "global_head_dim": 20,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, SLIDING, FULL, FULL],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 0,
}
"""Layers of two sizes of heads; no inputs by token."""

FAMILIES: dict[str, Tiny] = {
    "AFMoE": Tiny(
        "afmoe",
        {
            "head_dim": 10,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 2,
            "route_scale": 1.7,
            "mup_enabled": True,
            "sliding_window": WINDOW,
            "global_attn_every_n_layers": 2,
        },
    ),
    "Apertus": Tiny(
        "apertus",
        {
            "attention_bias": True,
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
    ),
    "Apertus, relu": Tiny("apertus", {"hidden_act": "relu2", **rope("default")}),
    "Arcee": Tiny("arcee", {"head_dim": 8, "mlp_bias": True}),
    "BLOOM": Tiny(
        "bloom",
        {"hidden_size": 36, "n_layer": 4, "n_head": 6},
        {"vocab_size": 97, "attn_implementation": "eager"},
    ),
    "Cohere": Tiny("cohere", {"logit_scale": 0.25, "attention_bias": True}),
    "Cohere 2 MoE": Tiny(
        "cohere2_moe",
        {
            **COHERE_EXPERTS,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 72,
        },
    ),
    "Cohere 2 MoE, shared": Tiny(
        "cohere2_moe",
        {
            **COHERE_EXPERTS,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_sliding_window_pattern": 2,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "Cohere 2": Tiny("cohere2", {"sliding_window": WINDOW, "head_dim": 10}),
    "Ernie 4.5": Tiny("ernie4_5", {"head_dim": 10, "use_bias": True}),
    "DeepSeek V2": Tiny(
        "deepseek_v2",
        {**DEEPSEEK_EXPERTS, "topk_method": "group_limited_greedy", "norm_topk_prob": False, **MSCALED},
        LATENT,
    ),
    "DeepSeek V2 Lite": Tiny(
        "deepseek_v2",
        {**DEEPSEEK_EXPERTS, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        LATENT,
    ),
    "DeepSeek V3": Tiny("deepseek_v3", {**DEEPSEEK_EXPERTS, **MSCALED}, LATENT),
    "DeepSeek V3.2": Tiny("deepseek_v32", {**DEEPSEEK_EXPERTS, **MSCALED, **INDEXER}, LATENT),
    "Dots 1": Tiny(
        "dots1", {**DEEPSEEK_EXPERTS, "head_dim": 8, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "Ernie 4.5 MoE": Tiny(
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "FlexOlmo": Tiny("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None}),
    "EXAONE 4": Tiny("exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "K-EXAONE": Tiny(
        "exaone_moe",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "head_dim": 10,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
    "EXAONE 4, no windows": Tiny("exaone4", {"sliding_window": None, "layer_types": [FULL] * 4}),
    "Falcon 7B": Tiny("falcon", {"ffn_hidden_size": 56}, NO_MLP),
    "Falcon 40B": Tiny("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, NO_MLP),
    "Falcon, one norm": Tiny(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        NO_MLP,
    ),
    "Falcon, in turn": Tiny("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}, NO_MLP),
    "Gemma": Tiny("gemma", {"head_dim": 10}),
    "Gemma 2": Tiny("gemma2", {"head_dim": 10, "sliding_window": WINDOW, "query_pre_attn_scalar": 11}),
    "Gemma 3": Tiny(
        "gemma3_text",
        {
            "head_dim": 10,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 11,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma 4": Tiny("gemma4_text", GEMMA4),
    "Gemma 4, shared keys": Tiny(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "Gemma 4, keys as values": Tiny(
        "gemma4_text",
        {
            **GEMMA4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "global_head_dim": 20,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "final_logit_softcapping": None,
        },
    ),
    "Gemma 4 MoE": Tiny(
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "GLM": Tiny("glm", {"head_dim": 12, "pad_token_id": 0}),
    "GLM 4": Tiny("glm4", {"head_dim": 12, "pad_token_id": 0}),
    "GLM 4.5": Tiny(
        "glm4_moe", {**DEEPSEEK_EXPERTS, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}
    ),
    "GLM 4.7 Flash": Tiny("glm4_moe_lite", {**DEEPSEEK_EXPERTS, "q_lora_rank": 22, "v_head_dim": 12}, LATENT),
    "GLM 5": Tiny(
        "glm_moe_dsa",
        {**DEEPSEEK_EXPERTS, **INDEXER, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        LATENT,
    ),
    "GPT-2": Tiny("gpt2", {}, GPT2),
    "GPT-BigCode": Tiny("gpt_bigcode", {}, GPT2),
    "GPT-BigCode, many heads": Tiny("gpt_bigcode", {"multi_query": False}, GPT2),
    "GPT-J": Tiny("gptj", {"rotary_dim": 4}, GPT2),
    "GPT-NeoX": Tiny("gpt_neox", {}, HEADS_ALIKE),
    "GPT-NeoX, in turn": Tiny(
        "gpt_neox", {"use_parallel_residual": False, "attention_bias": False}, HEADS_ALIKE
    ),
    "GPT-OSS": Tiny(
        "gpt_oss",
        {
            "head_dim": 10,
            "intermediate_size": 24,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "experts_implementation": "eager",
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, truncate=False),
        },
    ),
    "Granite": Tiny(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "Granite MoE": Tiny(
        "granitemoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "Granite MoE, shared": Tiny(
        "granitemoeshared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "Helium": Tiny("helium", {"head_dim": 8}),
    "Hunyuan": Tiny("hunyuan_v1_dense", {"head_dim": 10, "attention_bias": True}),
    "Hunyuan, alpha": Tiny("hunyuan_v1_dense", {"head_dim": 10, **rope("dynamic", alpha=50.0, factor=1.0)}),
    "Granite, windows": Tiny("granite_swa", GRANITE_WINDOWS),
    "Granite MoE, windows": Tiny(
        "granitemoe_swa",
        {
            **GRANITE_WINDOWS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            "layer_rope_theta": None,
        },
    ),
    "Hunyuan 3": Tiny(
        "hy_v3",
        {
            "head_dim": 10,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "router_scaling_factor": 1.7,
        },
    ),
    "Hunyuan MoE": Tiny("hunyuan_v1_moe", {"head_dim": 10, "num_experts": 5, "moe_topk": 2}),
    "Laguna": Tiny(
        "laguna",
        {
            **OF_TYPES,
            "num_attention_heads_per_layer": [4, 8, 8, 4],
            "shared_expert_intermediate_size": 96,
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                FULL: {**YARN["rope_parameters"], "partial_rotary_factor": 0.5},
                SLIDING: OF_TYPES["rope_parameters"][SLIDING],
            },
        },
    ),
    "Laguna, elements": Tiny(
        "laguna",
        {**OF_TYPES, "gating": "per-element", "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "Llama": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 4": Tiny(
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 96,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": WINDOW,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    "Llama, yarn": Tiny("llama", YARN),
    "Llama, linear": Tiny("llama", rope("linear", factor=2.0)),
    "Llama, llama3": Tiny(
        "llama",
        rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "Mellum 2": Tiny("mellum", {**OF_TYPES, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    "MiniCPM 3": Tiny("minicpm3", {"dim_model_base": 20, "scale_depth": 1.2, "scale_emb": 3}, LATENT),
    "Ministral": Tiny(
        "ministral", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2}
    ),
    "Ministral 3": Tiny(
        "ministral3",
        {
            "head_dim": 10,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=8,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
                beta_fast=4.0,
            ),
        },
    ),
    "Mistral": Tiny("mistral", {"sliding_window": WINDOW}),
    "MiniMax M2": Tiny(
        "minimax_m2",
        {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 4},
    ),
    "Mistral 4": Tiny(
        "mistral4",
        {
            **DEEPSEEK_EXPERTS,
            "rope_parameters": MSCALED["rope_parameters"] | {"llama_4_scaling_beta": 0.3},
        },
        LATENT,
        "Mistral4ForCausalLM",
    ),
    "Mixtral": Tiny("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "MPT": Tiny(
        "mpt",
        {"d_model": 36, "n_heads": 6, "n_layers": 4, "max_seq_len": 64},
        {"vocab_size": 97, "attn_implementation": "eager"},
    ),
    "Nemotron": Tiny("nemotron", {"head_dim": 8, "mlp_bias": True}),
    "OLMo": Tiny("olmo", {"clip_qkv": 0.5}),
    "OLMo 2": Tiny("olmo2", {}),
    "OLMo 3": Tiny("olmo3", {"sliding_window": WINDOW}),
    "OLMo 3, yarn": Tiny("olmo3", {"sliding_window": WINDOW, "rope_scaling": {**YARN["rope_parameters"]}}),
    "OLMoE": Tiny("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "OPT": Tiny("opt", {"ffn_dim": 56, "word_embed_proj_dim": 32}, NO_MLP),
    "Phi": Tiny("phi", {}, FOUR),
    "Phi 3": Tiny("phi3", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "Phi 3.5 MoE": Tiny(
        "phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": WINDOW,
            # never longer: for longer texts the class of transformers keeps the frequencies of short ones
            "rope_parameters": {
                **LONGROPE["rope_parameters"],
                "original_max_position_embeddings": 64,
                "short_mscale": 1.25,
                "long_mscale": 1.25,
            },
        },
    ),
    "Phi 4": Tiny("phi3", {"pad_token_id": 0, **LONGROPE}),
    "Qwen 2": Tiny("qwen2", {"tie_word_embeddings": True}),
    "Qwen 2, windows": Tiny(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    # heads wider than hidden_size / num_heads, as in Qwen3-0.6B
    "Qwen 2 MoE": Tiny(
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "Qwen 3": Tiny("qwen3", {"head_dim": 10, "attention_bias": True}),
    "Qwen 3 MoE": Tiny(
        "qwen3_moe",
        {
            "head_dim": 10,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "Seed-OSS": Tiny("seed_oss", {"head_dim": 10, "attention_out_bias": True}),
    "SmolLM 3": Tiny("smollm3", {"pad_token_id": 0}),
    "SmolLM 3, windows": Tiny(
        "smollm3",
        {
            "pad_token_id": 0,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "Solar Open": Tiny(
        "solar_open",
        {**DEEPSEEK_EXPERTS, "head_dim": 12, "attention_bias": True, "first_k_dense_replace": 0, **YARN},
        {key: value for key, value in FOUR.items() if key != "intermediate_size"},
    ),
    "StableLM": Tiny("stablelm", {"use_qkv_bias": True}),
    "StableLM, parallel": Tiny("stablelm", {"use_parallel_residual": True}),
    "StarCoder 2": Tiny("starcoder2", {"sliding_window": WINDOW}),
    "Youtu": Tiny("youtu", MSCALED, LATENT),
    "Youtu, halves": Tiny("youtu", {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 12}, LATENT),
}
