"""The tiny checkpoints of which conversions to .gguf are recorded, without what such files cannot say.

llama.cpp's converter drops some keys, and its code has a number for them: the window of Mistral, the pattern of windows
of Gemma, the chunks of Llama 4. The configs here have those numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.composites import MOE, qwen2_5_vl, qwen3_vl, transpose_experts
from tests.worker.models.encoder_families import ENCODERS, HEADS, SIZES, create_encoder
from tests.worker.models.families import FAMILIES, FULL, LONGROPE, SLIDING, Tiny, rope
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES

MSCALE_ALIKE = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=1.3,
    mscale_all_dim=1.3,
)
SHORT_MSCALE = (1 + math.log(4) / math.log(16)) ** 0.5  # of 64 positions that were 16
SIX_LAYERS = {"num_hidden_layers": 7, "layer_types": [SLIDING] * 5 + [FULL, SLIDING]}


GEMMA4 = {"global_head_dim": 20, "num_global_key_value_heads": None}


@dataclass(frozen=True)
class TinyEncoder:
    """An encoder, or a form of it."""

    class_name: str
    arguments: Mapping[str, Any]

    def create(self) -> Any:
        return create_encoder(self.class_name, self.arguments)


@dataclass(frozen=True)
class TinyComposite:
    """A decoder beside a tower for images."""

    create: Callable[[], Any]
    publish: Callable[[Path], None] | None = None
    """Changes a saved checkpoint to the form in which such models are published."""


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that llama.cpp's converter is run on."""

    tiny: Tiny | TinyEncoder | TinyComposite
    for_converter: Mapping[str, Any] = field(default_factory=dict)
    """Keys that published files have and transformers does not write, or writes in another way."""

    def save(self, directory: Path) -> Any:
        """Write the checkpoint with weights that differ, and return its model of transformers."""
        model = save_checkpoint(self.tiny.create(), directory)
        if isinstance(self.tiny, TinyComposite) and self.tiny.publish is not None:
            self.tiny.publish(directory)
        return model


def changed(name: str, for_converter: Mapping[str, Any] | None = None, **arguments: Any) -> Conversion:
    """Return a family with other arguments; those that are `...` are left out."""
    tiny = (FAMILIES | RECURRENT_FAMILIES)[name]
    merged = {**tiny.arguments, **arguments}
    kept = {key: value for key, value in merged.items() if value is not ...}
    sizes = {key: value for key, value in tiny.sizes.items() if merged.get(key) is not ...}
    return Conversion(replace(tiny, arguments=kept, sizes=sizes), for_converter or {})


CONVERSIONS: dict[str, Conversion] = {
    **{
        name: changed(name)
        for name in (
            *("Arcee", "BLOOM", "Cohere", "Ernie 4.5", "Ernie 4.5 MoE", "EXAONE 4", "EXAONE 4, no windows"),
            *("Falcon, one norm", "Gemma", "GLM 4", "GLM 4.5", "GLM 4.7 Flash", "GPT-BigCode", "GPT-OSS"),
            *("Granite", "Granite MoE", "Granite MoE, shared", "Hunyuan", "Llama", "Llama, yarn"),
            *("Llama, linear", "Llama, llama3", "MiniMax M2", "Mixtral", "Nemotron", "OLMo", "OLMo 2"),
            *("OLMo 3", "OLMo 3, yarn", "Phi 3", "Phi 4", "Qwen 2", "Qwen 3", "Seed-OSS", "SmolLM 3"),
            *("Qwen 3.5", "Qwen 3.5 MoE", "Apertus"),
            *(
                "StableLM",
                "StableLM, parallel",
                "Jamba",
                "LFM2",
                "Mamba",
                "Mamba 2",
                "Nemotron-H",
                "Nemotron-H, experts",
                "Nemotron-H, latent experts",
            ),
        )
    },
    "LFM2, experts": changed("LFM2, experts", routed_scaling_factor=1.0),
    "Qwen 2.5 VL": Conversion(TinyComposite(qwen2_5_vl)),
    "Qwen 3 VL": Conversion(TinyComposite(qwen3_vl)),
    "Qwen 3 VL MoE": Conversion(TinyComposite(lambda: qwen3_vl("Qwen3VLMoe", **MOE), transpose_experts)),
    "Cohere 2": changed("Cohere 2", {"rotary_pct": 1.0}, head_dim=...),
    # layers before the last of every four have windows, and the embedding is scaled
    "AFMoE": changed("AFMoE", global_attn_every_n_layers=4),
    "Cohere 2 MoE": changed("Cohere 2 MoE", {"first_k_dense_replace": 1}),
    "Cohere 2 MoE, softmax": changed(
        "Cohere 2 MoE", expert_selection_fn="softmax", norm_topk_prob=True, rms_norm_eps=...
    ),
    "DeepSeek V2": changed("DeepSeek V2", {"scoring_func": "softmax"}, **MSCALE_ALIKE),
    "DeepSeek V2 Lite": changed("DeepSeek V2 Lite", {"scoring_func": "softmax"}),
    "DeepSeek V3": changed("DeepSeek V3", {"scoring_func": "sigmoid"}, **MSCALE_ALIKE),
    "DeepSeek V3.2": changed("DeepSeek V3.2", {"scoring_func": "sigmoid"}, **MSCALE_ALIKE),
    "Dots 1": changed("Dots 1", sliding_window=None, max_window_layers=4),
    "Falcon 7B": changed("Falcon 7B", {"num_kv_heads": 1}),
    "Falcon 40B": changed("Falcon 40B", bias=False),
    "Falcon-H1": changed("Falcon-H1", {"head_dim": 8}, ssm_multipliers=[1.0] * 5),
    "Falcon-H1, norm": changed("Falcon-H1, norm", {"head_dim": 8}),
    "Gemma 2": changed("Gemma 2", query_pre_attn_scalar=10),
    "Gemma 3": changed(
        "Gemma 3",
        query_pre_attn_scalar=10,
        **SIX_LAYERS,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "Gemma 4": changed("Gemma 4", GEMMA4),
    "Gemma 4 MoE": changed("Gemma 4 MoE", {**GEMMA4, "num_global_key_value_heads": 1}),
    "Gemma 4, keys as values": changed(
        "Gemma 4, keys as values", {**GEMMA4, "num_global_key_value_heads": 1}, attention_bias=False
    ),
    "Gemma 4, shared keys": changed("Gemma 4, shared keys", GEMMA4),
    "GLM": changed("GLM", {"seq_length": 64}, head_dim=8),
    "GLM 5": changed("GLM 5", {"scoring_func": "sigmoid"}),
    "GPT-2": changed("GPT-2", {"n_ctx": 64}),
    "GPT-NeoX": changed("GPT-NeoX", {"rotary_pct": 0.25}),
    "GPT-NeoX, in turn": changed("GPT-NeoX, in turn", {"rotary_pct": 0.25}, attention_bias=True),
    "Granite, windows": changed(
        "Granite, windows",
        {"no_rope_layers": [0, 1, 1, 0]},
        layer_rope_theta=[0, 500.0, 500.0, 0],
        **rope("default", rope_theta=500.0),
    ),
    "Granite MoE, windows": changed("Granite MoE, windows", layer_types=...),
    "Granite 4": changed("Granite 4", {"layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "Granite 4, dense": changed(
        "Granite 4, dense",
        position_embedding_type=None,
        for_converter={"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
    "Hunyuan 3": changed("Hunyuan 3", {"num_nextn_predict_layers": 0}),
    "Hunyuan MoE": changed(
        "Hunyuan MoE", {"moe_intermediate_size": [64], "moe_topk": [2], "num_shared_expert": [1]}
    ),
    "K-EXAONE": changed("K-EXAONE", {"scoring_func": "sigmoid", "first_k_dense_replace": 1}),
    "Laguna": changed(
        "Laguna", num_attention_heads_per_layer=[4, 8, 8, 8], layer_types=[FULL] + [SLIDING] * 3
    ),
    "Laguna, elements": changed(
        "Laguna, elements",
        layer_types=[FULL] + [SLIDING] * 3,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "Mellum 2": changed("Mellum 2", mlp_layer_types=["sparse"] * 4),
    "Llama 4": changed(
        "Llama 4",
        {"no_rope_layers": None},
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        floor_scale=8192,
        attn_scale=0.1,
    ),
    "MiniCPM 3": changed("MiniCPM 3", dim_model_base=256, scale_depth=1.4, scale_emb=12),
    "Ministral 3": changed("Ministral 3"),
    "Mistral": changed("Mistral", sliding_window=None),
    "OLMoE": changed("OLMoE", clip_qkv=None),
    "Phi": changed("Phi", num_key_value_heads=4),
    "Phi 3.5 MoE": changed(
        "Phi 3.5 MoE",
        {"architectures": ["PhiMoEForCausalLM"]},
        router_jitter_noise=0.01,
        rope_parameters={
            **LONGROPE["rope_parameters"],
            "short_factor": LONGROPE["rope_parameters"]["long_factor"],
            "short_mscale": SHORT_MSCALE,
            "long_mscale": SHORT_MSCALE,
        },
    ),
    "Qwen 2 MoE": changed("Qwen 2 MoE", mlp_only_layers=[], use_sliding_window=False),
    "Qwen 3 MoE": changed("Qwen 3 MoE", mlp_only_layers=[]),
    "Qwen3-Next": changed("Qwen3-Next", mlp_only_layers=[]),
    "Solar Open": changed("Solar Open", {"scoring_func": "sigmoid", "partial_rotary_factor": 1.0}),
    "StarCoder 2": changed("StarCoder 2", sliding_window=None),
    "Youtu": changed("Youtu", **MSCALE_ALIKE),
    "Youtu, no latent of queries": changed("Youtu, halves", rope_interleave=True),
    "MPT": changed(
        "MPT",
        {
            "architectures": ["MPTForCausalLM"],
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None},
        },
    ),
}

_OLDER_NOMIC = {
    "activation_function": "swiglu", "causal": False, "qkv_proj_bias": False,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_emb_base": 500.0,
    "max_trained_positions": 2048, "n_positions": 8192,
}  # fmt: skip
"""Keys of files that came with code of their own, which the converter asks for."""

ENCODER_CONVERSIONS: dict[str, Conversion] = {
    **{name: Conversion(TinyEncoder(*ENCODERS[name])) for name in ("BERT", "RoBERTa", "XLM-R", "DistilBERT")},
    "BERT of one type": Conversion(TinyEncoder("BertModel", {**SIZES, "type_vocab_size": 1})),
    "ModernBERT": Conversion(
        TinyEncoder(*ENCODERS["ModernBERT"]), {"layer_norm_eps": 1e-5, "norm_eps": 1e-5}
    ),
    "ModernBERT with biases": Conversion(
        TinyEncoder(*ENCODERS["ModernBERT with biases"]), {"layer_norm_eps": 1e-5, "norm_eps": 1e-5}
    ),
    "Nomic": Conversion(TinyEncoder(*ENCODERS["Nomic"]), _OLDER_NOMIC),
    "XLM-R, classifier": Conversion(TinyEncoder(*HEADS["XLM-R"])),
    "ModernBERT, classifier": Conversion(
        TinyEncoder(*HEADS["ModernBERT"]), {"layer_norm_eps": 1e-5, "norm_eps": 1e-5}
    ),
    "RoBERTa, classifier": Conversion(TinyEncoder(*HEADS["RoBERTa"])),
}
"""Those of encoders."""
