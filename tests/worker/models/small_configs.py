"""Tiny configs of transformers' decoders and encoders, made from their defaults."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 4

_SIZES: dict[str, int] = {
    "vocab_size": 97, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim_model": 64, "embedding_size": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96, "dim_ff": 96, "shared_intermediate_size": 48, "d_ff": 96,
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS, "encoder_layers": NUM_LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "dim_head": 16,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "seq_length": 128,
    "sliding_window": 6, "attention_chunk_size": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "num_experts_per_token": 2, "moe_topk": 2,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "expert_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 2,
    "mask_token_id": 3, "type_vocab_size": 2, "rotary_dim": 8, "qk_head_dim": 24, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "laurel_rank": 8, "global_head_dim": 32,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_d_ssm": 128, "mamba_head_dim": 16,
    "max_target_positions": 128, "pooler_hidden_size": 64, "emb_dim": 64, "entity_vocab_size": 10, "dim": 64,
    "hidden_dim": 96,
}  # fmt: skip
"""Key of a config -> its value, where the config has the key and a number there."""

_WHEN_UNSET = {
    "head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_topk": 2, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
"""Key whose default is None -> its value."""

_OVERRIDES: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": 97, "pad_token_id": 1, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "lilt": {"hidden_size": 96},
    # many cycles would amplify differences of a bit to other tokens
    "hrm_text": {"num_layers_per_stack": 1},
}
"""Type of a model -> what its tiny config needs besides."""


def small_config(model_type: str, encoder_class: str = "") -> PreTrainedConfig:
    """Return a tiny config of a decoder, or of an encoder's class."""
    class_name = encoder_class or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config_class = getattr(transformers, class_name).config_class
    values = config_class().to_dict()
    _shrink(values)
    values.update(_OVERRIDES.get(model_type, {}))
    values["architectures"] = [class_name]
    values["tie_word_embeddings"] = values.get("tie_word_embeddings", False)
    if "is_decoder" in values:
        values["is_decoder"] = not encoder_class
    values.pop("dtype", None)
    config: PreTrainedConfig = config_class.from_dict(values)
    return config


def _shrink(values: dict[str, Any]) -> None:
    depths = [
        values[key]
        for key in ("num_hidden_layers", "n_layer", "num_layers")
        if isinstance(values.get(key), int)
    ]
    rotary_dim = values.get("qk_rope_head_dim")
    kinds = values.get("layer_types")
    for key, value in values.items():
        if key == "per_layer_config" and value:
            values[key] = _by_kind(value, kinds or [])
        elif isinstance(value, dict):
            _shrink(value)
        elif key in _WHEN_UNSET and value is None:
            values[key] = _WHEN_UNSET[key]
        elif isinstance(value, list) and depths and len(value) == depths[0]:
            values[key] = _every_kind(value)
        elif key == "num_key_value_heads" and rotary_dim is not None:
            values[key] = _SIZES["num_attention_heads"]  # latent attention has as many of each
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            # a head's width is that of its rotated part in some families
            values[key] = _SIZES["qk_rope_head_dim" if key == "head_dim" and value == rotary_dim else key]
        elif key == "eos_token_id" and value is not None:
            values[key] = _SIZES[key]
        elif isinstance(key, str) and key.endswith("_token_id") and isinstance(value, int):
            values[key] = value % 97


def _by_kind(index_to_value: dict[Any, Any], kinds: list[str]) -> dict[int, Any]:
    """Return what some layers have of their own for a few layers of the same kinds."""
    of_kind = {kinds[int(index)]: value for index, value in index_to_value.items()}
    return {index: of_kind[kind] for index, kind in enumerate(_every_kind(kinds)) if kind in of_kind}


def _every_kind(values: list[Any]) -> list[Any]:
    """Return a value for each of a few layers, with as many kinds of layers as fit."""
    kinds = list(dict.fromkeys(map(str, values)))
    by_kind = {str(value): value for value in values}
    return [by_kind[kinds[index % len(kinds)]] for index in range(NUM_LAYERS)]
