"""`ctranslate2_convert.py MODEL_DIRECTORY WEIGHTS.npz QUANTIZATION TARGET`: a Llama model in CTranslate2's form.

CTranslate2's own converter would bring torch and transformers into its environment; this is what it does for
LlamaForCausalLM (ctranslate2/converters/transformers.py, LlamaLoader), from numpy arrays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from ctranslate2.converters import utils
from ctranslate2.specs import common_spec, transformer_spec


def main(model: Path, weights: Path, quantization: str, target: str) -> None:
    config = json.loads((model / "config.json").read_text())
    with np.load(weights) as tensors:
        spec = build_spec(config, tensors)
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    id_to_token = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    id_to_token |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    spec.register_vocabulary([id_to_token[token_id] for token_id in range(config["vocab_size"])])
    names = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    spec.config.bos_token = names["bos_token"]
    spec.config.eos_token = names["eos_token"]
    spec.config.unk_token = names["unk_token"]
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    spec.save(target)


def build_spec(
    config: dict[str, object], tensors: dict[str, np.ndarray]
) -> transformer_spec.TransformerDecoderModelSpec:
    """`tensors`: float32, under Hugging Face's names."""
    if config["rope_scaling"] is not None or not config["tie_word_embeddings"]:
        raise ValueError(f"no scaled rope and no head of its own are known here, but {config}")
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["model.embed_tokens.weight"]
    decoder.projection.weight = decoder.embeddings.weight
    decoder.layer_norm.gamma = tensors["model.norm.weight"]
    for number, layer in enumerate(decoder.layer):
        prefix = f"model.layers.{number}"
        layer.self_attention.layer_norm.gamma = tensors[f"{prefix}.input_layernorm.weight"]
        layer.ffn.layer_norm.gamma = tensors[f"{prefix}.post_attention_layernorm.weight"]
        projections = []
        for name in ("q_proj", "k_proj", "v_proj"):
            projections.append(common_spec.LinearSpec())
            projections[-1].weight = tensors[f"{prefix}.self_attn.{name}.weight"]
        utils.fuse_linear(layer.self_attention.linear[0], projections)
        layer.self_attention.linear[1].weight = tensors[f"{prefix}.self_attn.o_proj.weight"]
        layer.ffn.linear_0.weight = tensors[f"{prefix}.mlp.gate_proj.weight"]
        layer.ffn.linear_0_noact.weight = tensors[f"{prefix}.mlp.up_proj.weight"]
        layer.ffn.linear_1.weight = tensors[f"{prefix}.mlp.down_proj.weight"]
    return spec


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
