"""The config.json files with which models are published, with the keys that they have there and what those mean.

Lists are shortened to the layers that differ, and sizes that no other key depends on are left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GlmMoeDsaConfig

from triptych.checkpoint.architecture import IndexerSpec, ModelArchitecture
from triptych.checkpoint.config_json import read_architecture
from triptych.errors import FeatureDisabled, ModelError

Config = dict[str, Any]

WRITTEN_BY = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "auto_map": {}}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
GPT2 = {
    "n_embd": 768,
    "n_layer": 4,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
DEEPSEEK = NO_GROUPS | {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
}
LAYER_NORM = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "rope_theta")}
FALCON = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "bias": False,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_hidden_layers": 4,
    "vocab_size": 65024,
    "layer_norm_epsilon": 1e-5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
}
PHI3 = LLAMA | {
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_size": 3072,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
}
QWEN = LLAMA | {
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
COHERE = LAYER_NORM | {
    "layer_norm_eps": 1e-5,
    "rope_theta": 8000000.0,
    "logit_scale": 0.0625,
    "pad_token_id": 0,
    "use_qk_norm": False,
}

PUBLISHED: dict[str, tuple[str, Config, Config]] = {
    "gpt2-medium": (
        "GPT2LMHeadModel",
        GPT2
        | {
            "activation_function": "gelu_new",
            "n_ctx": 1024,
            "n_special": 0,
            "predict_special_tokens": True,
            "output_past": True,
        },
        {"tied": True, "width": 3072, "activation": "gelu_pytorch_tanh", "positions": 1024, "rope": None},
    ),
    "starcoder": (
        "GPTBigCodeForCausalLM",
        GPT2
        | {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "inference_runner": 0,
            "max_batch_size": None,
            "max_sequence_length": None,
            "multi_query": True,
            "n_inner": 24576,
            "pad_key_length": True,
            "pre_allocate_kv_cache": False,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "validate_runner_input": True,
        },
        {"tied": True, "width": 24576, "activation": "gelu", "kv_heads": 1},
    ),
    "gpt-neox-20b": (
        "GPTNeoXForCausalLM",
        NO_GROUPS
        | {
            "attention_probs_dropout_prob": 0,
            "hidden_dropout_prob": 0,
            "hidden_act": "gelu_fast",
            "layer_norm_eps": 1e-5,
            "rms_norm_eps": None,
            "rope_theta": None,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
        },
        {"tied": False, "rotary_dim": 32, "activation": "gelu_pytorch_tanh", "qkv_bias": True},
    ),
    "opt-125m": (
        "OPTForCausalLM",
        {
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 4,
            "pad_token_id": 1,
            "prefix": "</s>",
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
        {"tied": True, "activation": "relu", "qkv_bias": True, "positions": 2048},
    ),
    "bloom-560m": (
        "BloomForCausalLM",
        {
            "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "hidden_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "masked_softmax_fusion": True,
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 4,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "pad_token_id": 3,
            "pretraining_tp": 2,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "slow_but_exact": False,
            "unk_token_id": 0,
            "vocab_size": 250880,
        },
        {"tied": True, "width": 4096, "head_dim": 64, "positions": 2048},
    ),
    "falcon-7b": ("FalconForCausalLM", FALCON, {"tied": True, "kv_heads": 1, "head_dim": 64, "width": 18176}),
    "falcon-180B": (
        "FalconForCausalLM",
        FALCON
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "hidden_size": 14848,
            "num_attention_heads": 232,
        },
        {"kv_heads": 8, "parallel": "two_norms", "head_dim": 64},
    ),
    "falcon-11B": (
        "FalconForCausalLM",
        FALCON
        | {
            "activation": "gelu",
            "ff_factor": 4,
            "ffn_hidden_size": 16384,
            "hidden_size": 4096,
            "max_position_embeddings": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "num_ln_in_parallel_attn": 1,
            "rope_scaling": None,
            "rope_theta": 500042.0,
            "tie_word_embeddings": False,
        },
        {"tied": False, "parallel": "one_norm", "width": 16384, "theta": 500042.0},
    ),
    "mpt-7b-storywriter": (
        "MPTForCausalLM",
        {
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 16,
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": 6,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "d_model": 4096,
            "emb_pdrop": 0,
            "embedding_fraction": 1.0,
            "expansion_ratio": 4,
            "init_config": {"name": "kaiming_normal_"},
            "init_device": "cpu",
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 65536,
            "n_heads": 32,
            "n_layers": 4,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "resid_pdrop": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b",
            "verbose": 0,
            "vocab_size": 50432,
        },
        {"name": "MptForCausalLM", "tied": True, "clip_qkv": 6.0, "width": 16384},
    ),
    "gpt-j-6b": (
        "GPTJForCausalLM",
        GPT2
        | {
            "activation_function": "gelu_new",
            "gradient_checkpointing": False,
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "rotary": True,
            "rotary_dim": 64,
            "scale_attn_weights": True,
            "tie_word_embeddings": False,
            "tokenizer_class": "GPT2Tokenizer",
        },
        {"tied": False, "rotary_dim": 64, "head_dim": 256, "width": 16384},
    ),
    "phi-2": (
        "PhiForCausalLM",
        LAYER_NORM
        | {
            "hidden_act": "gelu_new",
            "hidden_size": 2560,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "embd_pdrop": 0.0,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "resid_pdrop": 0.1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        {"head_dim": 80, "rotary_dim": 32, "tied": False, "activation": "gelu_pytorch_tanh"},
    ),
    "Phi-3-mini-4k": (
        "Phi3ForCausalLM",
        PHI3 | {"sliding_window": 2047, "max_position_embeddings": 4096, "rope_scaling": None},
        {"windows": [2047] * 4, "eps": 1e-5},
    ),
    "Phi-3-mini-128k, at first": (
        "Phi3ForCausalLM",
        PHI3 | {"rope_scaling": {"type": "su", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}},
        {"kind": "longrope", "windows": [0] * 4, "rope_factor": 32.0},
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        PHI3
        | {
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
            "tie_word_embeddings": True,
        },
        {"rotary_dim": 96, "tied": True, "kind": "longrope"},
    ),
    "stablelm-2-1_6b": (
        "StableLmForCausalLM",
        LAYER_NORM
        | {
            "layer_norm_eps": 1e-5,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "rope_pct": 0.25,
            "rope_theta": 10000,
            "rotary_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "use_qkv_bias": True,
        },
        {"rotary_dim": 32, "qkv_bias": True, "tied": False},
    ),
    "MiniCPM3-4B": (
        "MiniCPM3ForCausalLM",
        NO_GROUPS
        | {
            "dim_model_base": 256,
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "kv_lora_rank": 256,
            "max_position_embeddings": 32768,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [2.0] * 16,
                "short_factor": [1.0] * 16,
                "original_max_position_embeddings": 32768,
            },
            "scale_depth": 1.4,
            "scale_emb": 12,
        },
        {"tied": True, "latent": (256, 768, 64, 32, 64), "kind": "longrope", "multipliers": (12.0, 0.7, 0.1)},
    ),
    "Youtu-LLM-2B": (
        "YoutuForCausalLM",
        NO_GROUPS
        | {
            "embedding_initializer_range": 0.01,
            "hidden_size": 2048,
            "kv_lora_rank": 512,
            "mlp_bias": False,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 1536,
            "qk_head_dim": 192,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_interleave": True,
            "rope_scaling": None,
            "rope_theta": 1600000,
            "tie_word_embeddings": True,
            "v_head_dim": 128,
        },
        {"tied": True, "latent": (512, 1536, 128, 64, 128), "theta": 1600000.0, "scale": 192**-0.5},
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
        },
        {
            "latent": (512, 0, 128, 64, 128),
            "experts": (64, 6),
            "router": ("softmax", 1, 1, 1, False, 1.0, (), 2816),
            "dense": 1,
            "scale": pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2),
        },
    ),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "n_group": 8,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "q_lora_rank": 1536,
            "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 16.0,
            "scoring_func": "softmax",
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
        {"latent": (512, 1536, 128, 64, 128), "router": ("softmax", 8, 3, 1, False, 16.0, (), 4096)},
    ),
    "Kimi-K2, in 16 bits": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
            "rope_scaling": DEEPSEEK_YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "routed_scaling_factor": 2.827,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
        },
        {
            "latent": (512, 1536, 128, 64, 128),
            "router": ("sigmoid", 1, 1, 2, True, 2.827, (384,), 2048),
            "dense": 1,
            "scale": pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2),
        },
    ),
    "starcoder2-7b": (
        "Starcoder2ForCausalLM",
        LAYER_NORM
        | {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "norm_epsilon": 1e-5,
            "norm_type": "layer_norm",
            "residual_dropout": 0.1,
            "rope_theta": 1000000,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "use_bias": True,
        },
        {"windows": [4096] * 4, "tied": True, "activation": "gelu_pytorch_tanh", "qkv_bias": True},
    ),
    "gemma-2b, at first": (
        "GemmaForCausalLM",
        LLAMA | {"head_dim": 256, "hidden_act": "gelu", "pad_token_id": 0, "rope_scaling": None},
        {"tied": True, "head_dim": 256, "activation": "gelu_pytorch_tanh"},
    ),
    "gemma-2-9b": (
        "Gemma2ForCausalLM",
        LLAMA
        | {
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
        },
        {"windows": [4096, 0, 4096, 0], "soft_caps": (50.0, 30.0), "tied": True},
    ),
    "gemma-2, keys left out": (
        "Gemma2ForCausalLM",
        LLAMA,
        {"windows": [4096, 0] * 2, "soft_caps": (50.0, 30.0)},
    ),
    "gemma-3-1b": (
        "Gemma3ForCausalLM",
        LLAMA
        | {
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        {
            "windows": [512] * 5 + [0, 512],
            "thetas": {10000.0, 1000000.0},
            "soft_caps": (0.0, 0.0),
            "tied": True,
        },
    ),
    "gemma-3-4b": (
        "Gemma3ForConditionalGeneration",
        {
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 6,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "vision_use_head": False},
        },
        {
            "kinds": ["default"] * 5 + ["linear"],
            "kv_heads": 4,
            "head_dim": 256,
            "vocab": 262208,
            "tied": True,
        },
    ),
    "gemma-4-31b": (
        "Gemma4ForConditionalGeneration",
        {
            "audio_config": None,
            "audio_token_id": 258881,
            "boa_token_id": 256000,
            "boi_token_id": 255999,
            "eoa_token_index": 258883,
            "eoi_token_id": 258882,
            "image_token_id": 258880,
            "video_token_id": 258884,
            "text_config": {
                "attention_bias": False,
                "attention_k_eq_v": True,
                "enable_moe_block": False,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 5376,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 21504,
                "layer_types": [SLIDING] * 5 + [FULL],
                "max_position_embeddings": 262144,
                "model_type": "gemma4_text",
                "num_attention_heads": 32,
                "num_experts": None,
                "num_global_key_value_heads": 4,
                "num_hidden_layers": 6,
                "num_key_value_heads": 16,
                "num_kv_shared_layers": 0,
                "rope_parameters": {
                    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "sliding_window": 1024,
                "tie_word_embeddings": True,
                "use_bidirectional_attention": "vision",
                "vocab_size": 262144,
                "vocab_size_per_layer_input": 262144,
            },
            "vision_config": {"hidden_size": 1152},
        },
        {
            "windows": [1024] * 5 + [0],
            "kinds": ["default"] * 5 + ["proportional"],
            "kv_heads": 16,
            "head_dim": 512,
            "soft_caps": (0.0, 30.0),
            "vocab": 262144,
            "tied": True,
        },
    ),
    "Qwen2.5-7B": (
        "Qwen2ForCausalLM",
        QWEN,
        {"windows": [0] * 4, "qkv_bias": True, "theta": 1e6, "tied": False},
    ),
    "Qwen2.5-7B with yarn": (
        "Qwen2ForCausalLM",
        QWEN | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        {"kind": "yarn", "rope_factor": 4.0},
    ),
    "DeepSeek-R1-Distill-Qwen-7B": ("Qwen2ForCausalLM", QWEN | {"use_mrope": False}, {"windows": [0] * 4}),
    "MiMo-7B-RL": (
        "MiMoForCausalLM",
        QWEN
        | {
            "attention_bias": True,
            "head_dim": 128,
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 640000,
            "sliding_window": None,
            "use_mrope": False,
        },
        {"windows": [0] * 4, "qkv_bias": True, "theta": 640000, "head_dim": 128, "tied": False},
    ),
    "Qwen3-0.6B": (
        "Qwen3ForCausalLM",
        QWEN | {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None},
        {"head_dim": 128, "qk_norm": "head", "qkv_bias": False},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        QWEN
        | {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
        },
        {"width": 768, "experts": (128, 8)},
    ),
    "llama-7b": (
        "LLaMAForCausalLM",
        {
            key: value
            for key, value in NO_GROUPS.items()
            if key not in ("rope_theta", "max_position_embeddings")
        }
        | {"max_sequence_length": 2048, "pad_token_id": 0},
        {"name": "LlamaForCausalLM", "positions": 2048, "kv_heads": 32, "tied": False},
    ),
    "Yarn-Llama-2-7b": (
        "LlamaForCausalLM",
        LLAMA
        | {
            "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 32.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        {"kind": "yarn", "rope_factor": 32.0},
    ),
    "deepseek-coder-6.7b": (
        "LlamaForCausalLM",
        LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
        {"kind": "linear", "theta": 100000.0},
    ),
    "SmolLM3-3B": (
        "SmolLM3ForCausalLM",
        QWEN
        | {
            "attention_bias": False,
            "layer_types": [FULL] * 4,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "pretraining_tp": 2,
            "sliding_window": None,
        },
        {"has_rope": [True, True, True, False], "tied": True},
    ),
    "Mistral-7B-v0.1": ("MistralForCausalLM", LLAMA | {"sliding_window": 4096}, {"windows": [4096] * 4}),
    "Mistral-Nemo": (
        "MistralForCausalLM",
        LLAMA | {"head_dim": 128, "hidden_size": 5120, "sliding_window": None, "tie_word_embeddings": False},
        {"windows": [0] * 4, "head_dim": 128, "tied": False},
    ),
    "Mistral-Small-3.1": (
        "Mistral3ForConditionalGeneration",
        {
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": LLAMA | {"head_dim": 128, "model_type": "mistral", "sliding_window": None},
            "vision_config": {"model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
        {"windows": [0] * 4, "head_dim": 128, "tied": False},
    ),
    "Qwen2.5-VL-7B": (
        "Qwen2_5_VLForConditionalGeneration",
        LLAMA
        | {
            "image_token_id": 151655,
            "max_window_layers": 28,
            "model_type": "qwen2_5_vl",
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "video_token_id": 151656,
            "vision_config": {"depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]},
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
            "vision_token_id": 151654,
        },
        {"windows": [0] * 4, "qkv_bias": True, "kinds": ["default"] * 4, "theta": 1e6},
    ),
    "Qwen3-VL-30B-A3B": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "image_token_id": 151655,
            "text_config": LLAMA
            | {
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "head_dim": 128,
                "mlp_only_layers": [],
                "model_type": "qwen3_vl_moe_text",
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
            },
            "tie_word_embeddings": False,
            "video_token_id": 151656,
            "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27},
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
        },
        {"experts": (128, 8), "head_dim": 128, "tied": False, "theta": 5e6},
    ),
    "Mixtral-8x7B": (
        "MixtralForCausalLM",
        LLAMA
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        {"experts": (8, 2), "windows": [0] * 4},
    ),
    "OLMo-7B": (
        "OlmoForCausalLM",
        LLAMA | {"attention_bias": False, "clip_qkv": None, "pretraining_tp": 1, "rms_norm_eps": None},
        {"clip_qkv": 0.0, "tied": False, "eps": 1e-5},
    ),
    "Olmo-3-7B": (
        "Olmo3ForCausalLM",
        LLAMA
        | {
            "attention_bias": False,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
        },
        {"kinds": ["default"] * 3 + ["yarn"], "windows": [4096] * 3 + [0], "thetas": {500000.0}},
    ),
    "granite-3.1-2b": (
        "GraniteForCausalLM",
        LLAMA
        | {
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
            "tie_word_embeddings": True,
        },
        {"tied": True, "scale": 0.015625},
    ),
    "GLM-4-9B-0414": (
        "Glm4ForCausalLM",
        LLAMA | {"attention_bias": False, "head_dim": 128, "partial_rotary_factor": 0.5},
        {"rotary_dim": 64, "qkv_bias": False},
    ),
    "c4ai-command-r-v01": (
        "CohereForCausalLM",
        COHERE | {"model_max_length": 131072, "pretraining_tp": 1},
        {"tied": True, "theta": 8e6, "windows": [0] * 4},
    ),
    "c4ai-command-r7b": (
        "Cohere2ForCausalLM",
        COHERE
        | {
            "cache_implementation": "hybrid",
            "head_dim": 128,
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        {"windows": [4096] * 3 + [0], "has_rope": [True, True, True, False], "tied": True},
    ),
    "ERNIE-4.5-0.3B": (
        "Ernie4_5_ForCausalLM",
        LLAMA | {"hidden_size": 1024, "num_attention_heads": 16, "pad_token_id": 0, "use_bias": False},
        {"name": "Ernie4_5ForCausalLM", "head_dim": 128, "tied": True},
    ),
    "Seed-OSS-36B": (
        "SeedOssForCausalLM",
        LLAMA
        | {
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "num_attention_heads": 80,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
        },
        {"head_dim": 128, "qkv_bias": True},
    ),
    "EXAONE-4.0-32B": (
        "Exaone4ForCausalLM",
        LLAMA
        | {
            "head_dim": 128,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        {"windows": [4096] * 3 + [0], "has_rope": [True, True, True, False]},
    ),
    "Hunyuan-7B": (
        "HunYuanDenseV1ForCausalLM",
        LLAMA
        | {
            "add_classification_head": False,
            "attention_bias": False,
            "attention_head_dim": 128,
            "cla_share_factor": 2,
            "class_num": 0,
            "dense_list": [4096, 0],
            "eod_token_id": 127967,
            "head_dim": 128,
            "im_end_id": 5,
            "im_newline_id": 11,
            "im_start_id": 4,
            "mask_init_id": 12,
            "mlp_bias": False,
            "norm_type": "rms",
            "org_vocab_size": 128167,
            "pad_id": 127961,
            "pool_type": "last",
            "pretraining_tp": 1,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            "sep_token_id": 127962,
            "text_end_id": 7,
            "text_start_id": 6,
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
        {"kind": "default", "theta": 10000.0 * 1000.0 ** (128 / 126), "qk_norm": "head"},
    ),
    "Minitron-4B": (
        "NemotronForCausalLM",
        LAYER_NORM
        | {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "relu2",
            "mlp_bias": False,
            "norm_eps": 1e-5,
            "rope_percent": 0.5,
            "rope_theta": 10000,
        },
        {"rotary_dim": 64, "activation": "relu2", "tied": False},
    ),
    "Apertus-8B-Instruct-2509": (
        "ApertusForCausalLM",
        LLAMA
        | {
            "attention_bias": False,
            "hidden_act": "xielu",
            "mlp_bias": False,
            "post_norm": False,
            "qk_norm": True,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
                "type": "llama3",
            },
            "rope_theta": 12000000,
            "tie_word_embeddings": False,
        },
        {"activation": "xielu", "qk_norm": "head", "kind": "llama3", "qkv_bias": False},
    ),
    "K-EXAONE-236B-A23B": (
        "ExaoneMoEForCausalLM",
        LLAMA
        | {
            "first_last_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_size": 6144,
            "is_moe_layer": [False, True, True, True],
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "num_shared_experts": 1,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "sliding_window": 128,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
        },
        {"windows": [128, 128, 128, 0], "width": 11008, "experts": (128, 8), "qk_norm": "head"},
    ),
    "Solar-Open-100B": (
        "SolarOpenForCausalLM",
        LLAMA
        | {
            "first_k_dense_replace": 0,
            "head_dim": 128,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": 1.0,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
        },
        {"kind": "yarn", "width": 1280, "experts": (128, 8), "qk_norm": "none"},
    ),
    "Trinity-Nano-Preview": (
        "AfmoeForCausalLM",
        LLAMA
        | {
            "global_attn_every_n_layers": 4,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "load_balance_coeff": 0.001,
            "moe_intermediate_size": 256,
            "mup_enabled": True,
            "n_group": 1,
            "num_attention_heads": 8,
            "num_dense_layers": 2,
            "num_expert_groups": 1,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 2,
            "num_limited_groups": 1,
            "num_shared_experts": 1,
            "rope_scaling": None,
            "route_norm": True,
            "route_scale": 2.826,
            "score_func": "sigmoid",
            "sliding_window": 2048,
            "topk_group": 1,
            "use_grouped_mm": True,
        },
        {
            "windows": [2048, 2048, 2048, 0],
            "has_rope": [True, True, True, False],
            "width": 3072,
            "experts": (128, 8),
            "embedding": 32.0,
            "gate": "elements",
        },
    ),
    "North-Mini-Code-1.0": (
        "Cohere2MoeForCausalLM",
        {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        | {
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "layer_norm_eps": 1e-5,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "logit_scale": 1.0,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_shared_experts": 0,
            "prefix_dense_intermediate_size": 3072,
            "prefix_dense_sliding_window_pattern": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "tie_word_embeddings": None,
            "use_parallel_block": True,
            "use_qk_norm": False,
        },
        {
            "windows": [0, 4096, 4096, 0],
            "has_rope": [True, True, True, False],
            "width": 3072,
            "experts": (128, 8),
            "parallel": "one_norm",
            "eps": 1e-6,
        },
    ),
    "Hy-MT2-30B-A3B": (
        "HYV3ForCausalLM",
        {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        | {
            "enable_lm_head_fp32": True,
            "expert_hidden_dim": 768,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6912,
            "moe_intermediate_size": 768,
            "moe_router_enable_expert_bias": True,
            "moe_router_use_sigmoid": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1,
            "num_shared_experts": 1,
            "qk_norm": True,
            "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
            "route_norm": True,
            "router_scaling_factor": 2.826,
            "tie_word_embeddings": False,
        },
        {"width": 6912, "experts": (128, 8), "qk_norm": "head", "thetas": {11158840.0}},
    ),
    "Laguna-XS.2": (
        "LagunaForCausalLM",
        {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        | {
            "attention_bias": False,
            "gating": "per-head",
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_apply_router_weight_on_input": False,
            "moe_intermediate_size": 512,
            "moe_routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_attention_heads": 48,
            "num_attention_heads_per_layer": [48, 64, 64, 64],
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "rope_parameters": {
                FULL: {
                    "attention_factor": 1.3465735902799727,
                    "beta_fast": 64.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 8192,
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 500000.0,
                    "rope_type": "yarn",
                },
                SLIDING: {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
            },
            "shared_expert_intermediate_size": 512,
            "sliding_window": 512,
            "tie_word_embeddings": False,
        },
        {
            "windows": [0, 512, 512, 512],
            "kinds": ["yarn", "default", "default", "default"],
            "thetas": {500000.0, 10000.0},
            "heads": [48, 64, 64, 64],
            "width": 8192,
            "experts": (256, 8),
            "gate": "heads",
        },
    ),
    "AFM-4.5B": (
        "ArceeForCausalLM",
        {key: value for key, value in LLAMA.items() if key != "hidden_act"}
        | {
            "attention_bias": False,
            "head_dim": 128,
            "mlp_bias": False,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 20.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
            },
        },
        {"activation": "relu2", "kind": "yarn"},
    ),
}
"""Model -> `architectures`, its keys beside those that all have, and what is read from them."""


def facts(read: ModelArchitecture) -> Config:
    first, block, ends = read.layers[0], read.block, read.ends
    ropes = [layer.rope for layer in read.layers]
    rope = first.rope
    found: Config = {
        "name": read.name,
        "tied": read.tie_word_embeddings,
        "vocab": read.vocab_size,
        "positions": read.max_position_embeddings,
        "kv_heads": read.num_kv_heads,
        "head_dim": read.head_dim,
        "width": first.intermediate_size,
        "windows": [layer.window for layer in read.layers],
        "experts": (
            read.num_experts,
            max((layer.experts.num_experts_per_tok for layer in read.layers if layer.experts), default=0),
        ),
        "has_rope": [one is not None for one in ropes],
        "kinds": [one.kind for one in ropes if one],
        "thetas": {one.theta for one in ropes if one},
        "eps": block.norm.eps,
        "activation": block.activation,
        "parallel": block.parallel,
        "qk_norm": block.qk_norm,
        "qkv_bias": block.qkv_bias,
        "clip_qkv": block.clip_qkv,
        "scale": block.attention_scale,
        "gate": block.output_gate,
        "heads": [layer.num_heads for layer in read.layers],
        "embedding": ends.embedding_multiplier,
        "soft_caps": (block.attention_soft_cap, ends.logits_soft_cap),
        "rope": rope,
    }
    if (latent := first.latent) is not None:
        found["latent"] = (
            latent.kv_rank, latent.q_rank, latent.nope_dim, latent.rope_dim, first.value_dim
        )  # fmt: skip
        found["dense"] = sum(layer.experts is None for layer in read.layers)
        found["multipliers"] = (ends.embedding_multiplier, block.residual_multiplier, ends.logits_multiplier)
    if (experts := read.layers[-1].experts) is not None:
        found["router"] = (
            experts.score, experts.num_groups, experts.top_groups, experts.group_experts, experts.renormalize,
            experts.scale, experts.correction_shape, experts.shared_size,
        )  # fmt: skip
    if rope is not None:
        found |= {"kind": rope.kind, "theta": rope.theta, "rope_factor": rope.factor}
        found["rotary_dim"] = rope.rotary_dim
    return found


def read_published(directory: Path, architecture: str, config: Config) -> ModelArchitecture:
    (directory / "config.json").write_text(
        json.dumps(WRITTEN_BY | config | {"architectures": [architecture]})
    )
    return read_architecture(directory)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_mean_what_their_models_were_trained_with(tmp_path: Path, model: str) -> None:
    architecture, config, expected = PUBLISHED[model]
    found = facts(read_published(tmp_path, architecture, config))
    assert {key: found[key] for key in expected} == expected


CHOOSING = PUBLISHED["Kimi-K2, in 16 bits"][1] | {
    "max_position_embeddings": 163840, "index_topk": 2048, "num_hidden_layers": 6
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "num_heads", "is_interleaved"),
    [("DeepseekV32ForCausalLM", 64, False), ("GlmMoeDsaForCausalLM", 32, True)],
)
def test_each_layer_chooses_keys(
    architecture: str, num_heads: int, is_interleaved: bool, tmp_path: Path
) -> None:
    read = read_published(tmp_path, architecture, CHOOSING)
    indexer = IndexerSpec(num_heads, head_dim=128, is_interleaved=is_interleaved)
    assert [layer.latent and layer.latent.indexer for layer in read.layers] == [indexer] * 6
    assert read.max_context == read.max_position_embeddings == 163840
    without = read.without_indexers()
    assert (without.max_context, without.max_position_embeddings) == (2048, 163840)
    widths = [architecture.latent.width for architecture in (read, without) if architecture.latent]
    assert widths == [512 + 64 + 128, 512 + 64]
    other = read_published(tmp_path, architecture, CHOOSING | {"indexer_rope_interleave": not is_interleaved})
    assert [layer.latent.indexer.is_interleaved for layer in other.layers if layer.latent] == [  # type: ignore[union-attr]
        not is_interleaved
    ] * 6


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, []),
        ({"index_topk_freq": 2}, [2, 4]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [1, 2, 4, 5]),
        ({"index_topk_pattern": "FSSFFS", "index_topk_freq": 2}, [1, 2, 5]),
        ({"index_topk_pattern": ["full", "full", "shared"] * 2}, [2, 5]),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_pattern": "FFFFFF"}, [1, 2, 3, 4, 5]),
    ],
)
def test_layers_share_a_choice_as_transformers_reads_it(
    keys: Config, shared: list[int], tmp_path: Path
) -> None:
    read = read_published(tmp_path, "GlmMoeDsaForCausalLM", CHOOSING | keys)
    indexers = [layer.latent and layer.latent.indexer for layer in read.layers]
    assert [index for index, indexer in enumerate(indexers) if indexer and indexer.is_shared] == shared
    theirs = GlmMoeDsaConfig(**{**CHOOSING, **keys}).indexer_types
    assert [index for index, kind in enumerate(theirs) if kind == "shared"] == shared


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"index_topk_pattern": "FSX"}, "index_topk_pattern: 'FSX' must be F or S for each of 6 layers"),
        ({"index_topk_pattern": "SFFFFF"}, "indexer_types: 'shared' must be full for layer 0"),
        ({"indexer_types": ["full"] * 5}, "indexer_types: has 5 entries, must be a list of 6"),
        ({"q_lora_rank": None}, "q_lora_rank: .* must be a number: the indexer's queries"),
        ({"index_head_dim": 32}, "index_head_dim: 32 must be at least qk_rope_head_dim 64"),
    ],
)
def test_indexers_that_cannot_be_are_named(keys: Config, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_published(tmp_path, "GlmMoeDsaForCausalLM", CHOOSING | keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_attention_heads_per_layer": [48, 64, 60, 64]},
            "num_attention_heads_per_layer: 60.* of 8 key heads",
        ),
        ({"gating": "per-layer"}, "gating: 'per-layer' must be true, per-head or per-element"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers: \[1\] must name the dense mlp_layer_types"),
    ],
)
def test_keys_of_layers_that_contradict_are_named(keys: Config, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_published(tmp_path, "LagunaForCausalLM", PUBLISHED["Laguna-XS.2"][1] | keys)


def test_layers_with_experts_are_the_same_by_all_keys(tmp_path: Path) -> None:
    architecture, config, _ = PUBLISHED["K-EXAONE-236B-A23B"]
    changed = config | {"is_moe_layer": [True] * 4}
    with pytest.raises(
        ModelError, match=r"is_moe_layer: \[True, True.* must name the layers that the other keys"
    ):
        read_published(tmp_path, architecture, changed)
    kinds = ["dense", "sparse", "dense", "sparse"]
    read = read_published(tmp_path, architecture, config | {"mlp_layer_types": kinds, "is_moe_layer": None})
    assert [layer.experts is None for layer in read.layers] == [True, False, True, False]


@pytest.mark.parametrize(
    ("architecture", "config", "feature"),
    [
        (
            "SolarOpenForCausalLM",
            PUBLISHED["Solar-Open-100B"][1] | {"use_qk_norm": True},
            "use_qk_norm = True",
        ),
        ("FalconForCausalLM", FALCON | {"alibi": True}, "alibi = True"),
        (
            "LagunaForCausalLM",
            PUBLISHED["Laguna-XS.2"][1] | {"moe_router_logit_softcapping": 30.0},
            "moe_router_logit_softcapping = 30",
        ),
        (
            "AfmoeForCausalLM",
            PUBLISHED["Trinity-Nano-Preview"][1] | {"route_norm": False},
            "route_norm = False",
        ),
        (
            "Cohere2MoeForCausalLM",
            PUBLISHED["North-Mini-Code-1.0"][1]
            | {"num_shared_experts": 2, "shared_expert_combination_strategy": "average"},
            "shared_expert_combination_strategy = 'average'",
        ),
        (
            "HYV3ForCausalLM",
            PUBLISHED["Hy-MT2-30B-A3B"][1] | {"expert_hidden_dim": 64},
            "expert_hidden_dim = 64",
        ),
        (
            "Gemma4ForCausalLM",
            {"use_bidirectional_attention": "all", "num_hidden_layers": 6},
            "use_bidirectional_attention = 'all'",
        ),
        ("MiMoForCausalLM", QWEN | {"attention_bias": False}, "attention_bias = False"),
        ("StableLmForCausalLM", LAYER_NORM | {"qk_layernorm": True}, "qk_layernorm = True"),
        ("CohereForCausalLM", COHERE | {"use_qk_norm": True}, "use_qk_norm = True"),
        ("DeepseekV2ForCausalLM", DEEPSEEK | {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (
            "DeepseekV3ForCausalLM",
            DEEPSEEK | {"attention_bias": True},
            "attention_bias = True",
        ),
        ("DeepseekV3ForCausalLM", DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (
            "OPTForCausalLM",
            PUBLISHED["opt-125m"][1] | {"word_embed_proj_dim": 512},
            "word_embed_proj_dim = 512",
        ),
    ],
)
def test_published_configs_of_what_is_not_built_are_told(
    tmp_path: Path, architecture: str, config: Config, feature: str
) -> None:
    with pytest.raises(FeatureDisabled, match=feature):
        read_published(tmp_path, architecture, config)
