"""Architectures with attention and one MLP in every layer: config.json from the keys of a .gguf file."""

from __future__ import annotations

from triptych.checkpoint.gguf.keys import (
    Config,
    GgufModel,
    all_biases,
    attention,
    biases,
    by_type,
    experts,
    granite_factors,
    layer_types,
    mlp_width,
    named,
    pass_over_images,
    qkv_bias,
    read_rope,
)
from triptych.checkpoint.gguf.layout import ROPE_FREQUENCIES
from triptych.errors import ModelError


def llama(model: GgufModel) -> Config:
    config = attention(model) | biases(model)
    if not model.keys.integer("expert_count", default=0, minimum=0):
        return named("LlamaForCausalLM") | config
    del config["attention_bias"], config["mlp_bias"]
    return (
        named("MixtralForCausalLM") | config | experts(model, "num_local_experts", width="intermediate_size")
    )


def mistral3(model: GgufModel) -> Config:
    config = attention(model)
    beta = model.number("attention.temperature_scale", default=0.0)
    multiplier = model.number("rope.scaling.yarn_log_multiplier", default=0.0)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        # llama.cpp keeps one of two, which checkpoints have the same
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    if beta:
        rope |= {"llama_4_scaling_beta": beta}
    return named("Ministral3ForCausalLM") | config


def qwen2(model: GgufModel) -> Config:
    return named("Qwen2ForCausalLM") | attention(model)


def qwen3(model: GgufModel) -> Config:
    return named("Qwen3ForCausalLM") | attention(model) | all_biases(model)


def qwen2_vl(model: GgufModel) -> Config:
    pass_over_images(model)
    return qwen2(model)


def qwen3_vl(model: GgufModel) -> Config:
    pass_over_images(model)
    return qwen3(model)


def apertus(model: GgufModel) -> Config:
    return named("ApertusForCausalLM") | attention(model) | all_biases(model)


def gemma(model: GgufModel) -> Config:
    return named("GemmaForCausalLM", hidden_activation="gelu_pytorch_tanh") | attention(model)


def gemma2(model: GgufModel) -> Config:
    return (
        named("Gemma2ForCausalLM")
        | attention(model)
        | layer_types(model, every=2)
        | {
            "attn_logit_softcapping": model.number("attn_logit_softcapping", default=50.0),
            "final_logit_softcapping": model.number("final_logit_softcapping", default=30.0),
            "query_pre_attn_scalar": _query_scalar(model, num_layers=46),
        }
    )


def gemma3(model: GgufModel) -> Config:
    rope = read_rope(model, model.head_dim, default_base=1000000.0)
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", default=10000.0)}
    types = layer_types(model, every=6)
    return (
        named("Gemma3ForCausalLM")
        | attention(model, rope=by_type(types, rope, local))
        | types
        | {
            "final_logit_softcapping": model.number("final_logit_softcapping", default=0.0),
            "query_pre_attn_scalar": _query_scalar(model, num_layers=62),
        }
    )


def gemma4(model: GgufModel) -> Config:
    keys, types = model.keys, layer_types(model, every=6)
    kinds = types["layer_types"]
    dims = {
        "full_attention": _rotated_whole(model, ""),
        "sliding_attention": _rotated_whole(model, "_swa", default=model.head_dim),
    }
    kv_heads, widths = model.per_layer("attention.head_count_kv"), model.per_layer("feed_forward_length")
    num_shared = keys.integer("attention.shared_kv_layers", default=0, minimum=0)
    num_own = model.num_layers - num_shared
    if any(width != widths[0] for width in widths[:num_own]) or any(
        width not in (widths[0], 2 * widths[0]) or width != widths[-1] for width in widths[num_own:]
    ):
        keys.fail("feed_forward_length", widths, f"must double from layer {num_own} on, or be one number")
    without_values = set(range(num_own)) - set(model.layers_with("attn_v.weight"))
    full = {index for index in range(num_own) if kinds[index] == "full_attention"}
    if without_values not in (set(), full):
        raise ModelError(
            f"{keys.path}: layers {sorted(without_values)} have no attn_v, which are not the full ones"
        )
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", default=10000.0)}
    config = {
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "head_dim": dims["sliding_attention"],
        "per_layer_config": {
            str(index): {"head_dim": dims[kind], "num_key_value_heads": heads}
            for index, (kind, heads) in enumerate(zip(kinds, kv_heads, strict=True))
        },
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": by_type(types, _proportional_rope(model), local),
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": bool(without_values),
        "final_logit_softcapping": model.number("final_logit_softcapping", default=0.0),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", default=0, minimum=0),
    }
    if (table := model.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    if keys.integer("expert_count", default=0, minimum=0):
        config |= {"enable_moe_block": True} | experts(model, "num_experts", "top_k_experts")
    return named("Gemma4ForCausalLM") | config | types


def _rotated_whole(model: GgufModel, suffix: str, *, default: int | None = None) -> int:
    """Return the size of a head of one type of layers, all of which is rotated, and as long as its values."""
    size = model.keys.integer(f"attention.key_length{suffix}", default=default)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = model.keys.integer(f"{key}{suffix}", default=size)
        if found != size:
            model.keys.fail(f"{key}{suffix}", found, f"must be attention.key_length{suffix} {size}")
    return size


def _proportional_rope(model: GgufModel) -> Config:
    """Return the embedding of full layers: of the frequencies the last ones are divided by so much that they are 0."""
    theta = model.number("rope.freq_base", default=1000000.0)
    if ROPE_FREQUENCIES not in model.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    divisors = model.floats(ROPE_FREQUENCIES)
    num_kept = divisors.count(1.0)
    if (
        any(divisor != 1.0 for divisor in divisors[:num_kept])
        or min(divisors[num_kept:], default=1e30) < 1e20
    ):
        raise ModelError(
            f"{model.keys.path}: {ROPE_FREQUENCIES}: must be ones, then numbers of at least 1e20"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": num_kept / len(divisors),
    }


def _query_scalar(model: GgufModel, *, num_layers: int) -> float:
    """Return what scores are divided by the root of: of the model of 27B, with so many layers, no head's size."""
    if model.num_layers != num_layers:
        return model.head_dim
    return model.keys.integer("embedding_length") // model.keys.integer("attention.head_count")


def phi2(model: GgufModel) -> Config:
    return (
        named("PhiForCausalLM", hidden_act="gelu_new")
        | attention(model, eps="layer_norm_eps")
        | {"intermediate_size": mlp_width(model)}
    )


def phi3(model: GgufModel) -> Config:
    window = model.keys.integer("attention.sliding_window", default=0, minimum=0)
    return named("Phi3ForCausalLM") | attention(model) | {"sliding_window": window or None}


def starcoder2(model: GgufModel) -> Config:
    config = attention(model, eps="norm_epsilon")
    has_biases = model.has_all("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    return named("Starcoder2ForCausalLM", use_bias=has_biases) | config


def stablelm(model: GgufModel) -> Config:
    model.keys.pass_over("use_parallel_residual")  # which layers say by having one norm or two
    return (
        named("StableLmForCausalLM")
        | attention(model, eps="layer_norm_eps")
        | {
            "use_parallel_residual": not model.layers_with("ffn_norm.weight"),
            "use_qkv_bias": model.has_all("attn_q", "attn_k", "attn_v"),
            "qk_layernorm": bool(model.layers_with("attn_q_norm.weight")),
        }
    )


def olmo(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_eps")
    if config.pop("layer_norm_eps") != 1e-5:
        model.keys.fail(
            "attention.layer_norm_epsilon",
            model.keys.values.get("attention.layer_norm_epsilon"),
            "must be 1e-5",
        )
    return (
        named("OlmoForCausalLM")
        | config
        | {"clip_qkv": model.number("attention.clamp_kqv", default=0.0) or None}
    )


def olmo2(model: GgufModel) -> Config:
    keys, rope = model.keys, read_rope(model, model.head_dim)
    if not keys.integer("attention.sliding_window", default=0, minimum=0):
        return named("Olmo2ForCausalLM") | attention(model, rope=rope)
    theta = model.number("rope.freq_base_swa", default=rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    types = layer_types(model, every=4)
    return named("Olmo3ForCausalLM") | attention(model, rope=by_type(types, rope, local)) | types


def granite(model: GgufModel) -> Config:
    return named("GraniteForCausalLM") | attention(model) | biases(model) | granite_factors(model)


def cohere(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_eps") | all_biases(model)
    return named("CohereForCausalLM") | config | {"logit_scale": model.number("logit_scale")}


def cohere2(model: GgufModel) -> Config:
    return cohere(model) | named("Cohere2ForCausalLM") | layer_types(model, every=4)


def gpt2(model: GgufModel, *, name: str = "GPT2LMHeadModel") -> Config:
    config = attention(model, eps="layer_norm_epsilon", rope={})
    return named(name) | {
        "n_embd": model.keys.integer("embedding_length"),
        "n_layer": model.num_layers,
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": mlp_width(model),
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "hidden_size": None,
        "num_hidden_layers": None,
    }


def starcoder(model: GgufModel) -> Config:
    return gpt2(model, name="GPTBigCodeForCausalLM") | {"multi_query": True}


def gpt_neox(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_eps")
    model.keys.pass_over("attention.head_count_kv")
    return (
        named("GPTNeoXForCausalLM")
        | config
        | {
            "use_parallel_residual": model.keys.boolean("use_parallel_residual", default=True),
            "attention_bias": model.has_all("attn_qkv", "attn_output"),
        }
    )


def falcon(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_epsilon")
    is_new = bool(model.layers_with("attn_norm_2.weight")) or config["num_key_value_heads"] > 1
    del config["intermediate_size"]
    kv_heads = config.pop("num_key_value_heads")
    return (
        named("FalconForCausalLM")
        | config
        | {
            "new_decoder_architecture": is_new,
            "num_kv_heads": kv_heads if is_new else None,
            "num_ln_in_parallel_attn": 2 if model.layers_with("attn_norm_2.weight") else 1,
            "multi_query": True,
            "ffn_hidden_size": mlp_width(model),
            "bias": model.has_all("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        }
    )


def bloom(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_epsilon", rope={})
    return named("BloomForCausalLM") | {
        "n_head": config["num_attention_heads"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def mpt(model: GgufModel) -> Config:
    config = attention(model, eps="layer_norm_epsilon", rope={})
    keys = model.keys
    return named("MptForCausalLM") | {
        "d_model": keys.integer("embedding_length"),
        "n_layers": model.num_layers,
        "n_heads": config["num_attention_heads"],
        "max_seq_len": config["max_position_embeddings"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "attn_config": {
            "alibi": model.number("attention.max_alibi_bias", default=0.0) > 0,
            "alibi_bias_max": int(model.number("attention.max_alibi_bias", default=8.0)),
            "clip_qkv": model.number("attention.clamp_kqv", default=0.0) or None,
        },
        "hidden_size": None,
        "num_hidden_layers": None,
    }


def glm(model: GgufModel) -> Config:
    return named("GlmForCausalLM") | attention(model) | qkv_bias(model)


def glm4(model: GgufModel) -> Config:
    return named("Glm4ForCausalLM") | attention(model) | qkv_bias(model)


def smollm3(model: GgufModel) -> Config:
    return named("SmolLM3ForCausalLM", no_rope_layer_interval=4) | attention(model) | biases(model)


def exaone4(model: GgufModel) -> Config:
    types = layer_types(model, every=4)
    return named("Exaone4ForCausalLM") | attention(model) | {"sliding_window": None} | types


def nemotron(model: GgufModel) -> Config:
    config = attention(model, eps="norm_eps")
    mlp = {"mlp_bias": model.has_all("ffn_up", "ffn_down")}
    return named("NemotronForCausalLM") | config | all_biases(model) | mlp


def ernie(model: GgufModel) -> Config:
    config = attention(model)
    has_biases = model.has_all("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return named("Ernie4_5ForCausalLM", use_bias=has_biases) | config


def hunyuan(model: GgufModel) -> Config:
    return named("HunYuanDenseV1ForCausalLM") | attention(model) | all_biases(model)


def seed_oss(model: GgufModel) -> Config:
    return (
        named("SeedOssForCausalLM")
        | attention(model)
        | qkv_bias(model)
        | {
            "attention_out_bias": model.has_all("attn_output"),
            "mlp_bias": model.has_all("ffn_gate", "ffn_up", "ffn_down"),
        }
    )


def arcee(model: GgufModel) -> Config:
    mlp = {"mlp_bias": model.has_all("ffn_up", "ffn_down")}
    return named("ArceeForCausalLM") | attention(model) | all_biases(model) | mlp


def bert(model: GgufModel) -> Config:
    """Return BERT's, of which RoBERTa and DistilBERT are forms: without rows for padding, without token types."""
    if "cls.output.weight" in model.tensors and "cls.weight" not in model.tensors:
        raise ModelError(
            f"{model.keys.path}: cls.output.weight: the layer before it is missing, which converters of BERT "
            "leave out; use the model's safetensors directory"
        )
    return _encoder("Bert", model) | {"hidden_act": "gelu"}


def nomic_bert(model: GgufModel) -> Config:
    base = model.number("rope.freq_base", default=10000.0)
    rope = {"rope_type": "default", "rope_theta": base}
    return _encoder("NomicBert", model) | {"hidden_act": "silu", "rope_parameters": rope}


def modern_bert(model: GgufModel) -> Config:
    keys, config = model.keys, _encoder("ModernBert", model)
    del config["type_vocab_size"]
    pooling = keys.integer("classifier.pooling_type", default=2)
    if pooling not in (1, 2):
        keys.fail("classifier.pooling_type", pooling, "must be 1, mean, or 2, the first token")
    return config | {
        "norm_eps": config.pop("layer_norm_eps"),
        "classifier_pooling": ("mean", "cls")[pooling - 1],
        "classifier_bias": "cls.bias" in model.tensors,
        "norm_bias": bool(model.layers_with("ffn_norm.bias")),
        "attention_bias": model.has_all("attn_qkv", "attn_output"),
        "mlp_bias": model.has_all("ffn_up", "ffn_down"),
        "hidden_activation": keys.text("hidden_activation", default="gelu"),
        "local_attention": keys.integer("attention.sliding_window", default=128),
        "global_attn_every_n_layers": keys.integer("attention.sliding_window_pattern", default=3),
        "global_rope_theta": model.number("rope.freq_base", default=160000.0),
        "local_rope_theta": model.number("rope.freq_base_swa", default=10000.0),
    }


def _encoder(name: str, model: GgufModel) -> Config:
    """Return the sizes of an encoder, and the labels of one with a head."""
    keys, tensors = model.keys, model.tensors
    keys.expect("attention.causal", False, otherwise="tokens see no later ones")
    if "rope.scaling.type" in keys.values:
        keys.expect("rope.scaling.type", "none", otherwise="rotations are scaled")
    types = tensors.get("token_types.weight")
    config = {
        "num_attention_heads": keys.integer("attention.head_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "layer_norm_eps": model.number("attention.layer_norm_epsilon"),
    }
    labels = keys.values.get("classifier.output_labels")
    keys.pass_over("classifier.output_labels")
    if "cls.output.weight" not in tensors:
        return named(f"{name}Model") | config
    if not isinstance(labels, list):
        labels = [f"LABEL_{index}" for index in range(tensors["cls.output.weight"].shape[0])]
    numbered = {str(index): label for index, label in enumerate(labels)}
    return named(f"{name}ForSequenceClassification", id2label=numbered) | config
