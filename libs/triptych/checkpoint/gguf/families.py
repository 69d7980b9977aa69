"""config.json of a .gguf file: `general.architecture` and its keys -> the keys that a family here reads.

Files say less than config.json does: what an architecture implies in llama.cpp is not written down. The modules beside
this one have those facts, beside each family's keys. A key that nothing reads stops the conversion, as it may change
the model's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.gguf import dense, mixtures, recurrent
from triptych.checkpoint.gguf.header import GgufHeader
from triptych.checkpoint.gguf.keys import Config, GgufModel
from triptych.checkpoint.gguf.layout import TensorRules
from triptych.errors import ModelError

POOLING_KEY = "pooling_type"
"""Key of the states of a text that its vector is made of."""

_HARMLESS = (
    "vocab_size",  # the embedding has it
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "interleave_moe_layer_step",  # layers with experts are those that have the tensors
    "leading_dense_block_count",
    "nextn_predict_layers",
    "attention.key_length",
    "attention.value_length",
    "attention.head_count_kv",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "feed_forward_length",
    "context_length",
    "expert_count",
    "expert_used_count",
    "expert_group_count",
    "expert_group_used_count",
    "rope.freq_base",
    POOLING_KEY,  # which becomes a file of its own
)  # fmt: skip
"""Keys that change nothing where a family does not read them."""


Describe = Callable[[GgufModel], Config]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """The meaning of the keys and tensors of one `general.architecture`."""

    describe: Describe
    rules: TensorRules = field(default_factory=TensorRules)


_ROTATED = TensorRules(rotated_pairs=True)
_PLUS_ONE = TensorRules(norms_plus_one=lambda name: name.endswith("norm.weight"))
_FUSED_HALVES = TensorRules(renamed={"ffn_up": "mlp.gate_up_proj"})
_DELTA = TensorRules(
    renamed={
        "attn_qkv": "mixer.in_qkv",
        "attn_gate": "mixer.in_z",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "mixer.conv_qkv",
    },
    norms_plus_one=lambda name: name.endswith("norm.weight") and ".mixer." not in name,
)

_QWEN35 = replace(
    _DELTA, renamed={**_DELTA.renamed, "ssm_alpha": "mixer.in_a", "ssm_beta": "mixer.in_b"}, spread_heads=True
)

_GEMMA4 = TensorRules(
    renamed={
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    }
)

_APERTUS = TensorRules(
    layer_numbers={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
)

_GRANITE_WINDOWS = replace(_ROTATED, renamed={"ffn_up_shexp": "mlp.shared_experts.gate_up_proj"})
_GATED = TensorRules(renamed={"attn_gate": "self_attn.gate_proj"})

_FAMILIES = {
    "afmoe": GgufFamily(mixtures.afmoe, _GATED),
    "apertus": GgufFamily(dense.apertus, _APERTUS),
    "arcee": GgufFamily(dense.arcee, _ROTATED),
    "bert": GgufFamily(dense.bert),
    "bloom": GgufFamily(dense.bloom),
    "chatglm": GgufFamily(dense.glm, _FUSED_HALVES),
    "cohere2": GgufFamily(dense.cohere2),
    "cohere2moe": GgufFamily(mixtures.cohere2_moe),
    "command-r": GgufFamily(dense.cohere),
    "deepseek2": GgufFamily(mixtures.deepseek2),
    "deepseek32": GgufFamily(mixtures.deepseek32),
    "dots1": GgufFamily(mixtures.dots1),
    "ernie4_5": GgufFamily(dense.ernie),
    "ernie4_5-moe": GgufFamily(mixtures.ernie_moe),
    "exaone-moe": GgufFamily(mixtures.exaone_moe),
    "exaone4": GgufFamily(dense.exaone4),
    "falcon": GgufFamily(dense.falcon),
    "falcon-h1": GgufFamily(recurrent.falcon_h1),
    "gemma": GgufFamily(dense.gemma, _PLUS_ONE),
    "gemma2": GgufFamily(dense.gemma2, _PLUS_ONE),
    "gemma3": GgufFamily(dense.gemma3, _PLUS_ONE),
    "gemma4": GgufFamily(dense.gemma4, _GEMMA4),
    "glm-dsa": GgufFamily(mixtures.glm_dsa),
    "glm4": GgufFamily(dense.glm4, _FUSED_HALVES),
    "glm4moe": GgufFamily(mixtures.glm4_moe),
    "gpt-oss": GgufFamily(mixtures.gpt_oss),
    "gpt2": GgufFamily(dense.gpt2),
    "gptneox": GgufFamily(dense.gpt_neox),
    "granite": GgufFamily(dense.granite, _ROTATED),
    "granite_swa": GgufFamily(mixtures.granite_windows, _GRANITE_WINDOWS),
    "granitehybrid": GgufFamily(recurrent.granite_hybrid, _ROTATED),
    "granitemoe": GgufFamily(mixtures.granite_moe, _ROTATED),
    "hunyuan-dense": GgufFamily(dense.hunyuan),
    "hunyuan-moe": GgufFamily(mixtures.hunyuan_moe),
    "hy_v3": GgufFamily(mixtures.hunyuan3),
    "jamba": GgufFamily(recurrent.jamba),
    "laguna": GgufFamily(mixtures.laguna, _GATED),
    "lfm2": GgufFamily(recurrent.lfm2, TensorRules(renamed={"token_embd_norm": "model.norm"})),
    "lfm2moe": GgufFamily(recurrent.lfm2_moe, TensorRules(renamed={"token_embd_norm": "model.norm"})),
    "llama": GgufFamily(dense.llama, _ROTATED),
    "llama4": GgufFamily(mixtures.llama4),
    "mamba": GgufFamily(recurrent.mamba),
    "mamba2": GgufFamily(recurrent.mamba2),
    "mellum": GgufFamily(mixtures.mellum),
    "minicpm3": GgufFamily(mixtures.minicpm3),
    "minimax-m2": GgufFamily(mixtures.minimax_m2),
    "mistral3": GgufFamily(dense.mistral3, _ROTATED),
    "modern-bert": GgufFamily(dense.modern_bert, _FUSED_HALVES),
    "mpt": GgufFamily(dense.mpt),
    "nemotron": GgufFamily(dense.nemotron, _PLUS_ONE),
    "nemotron_h": GgufFamily(recurrent.nemotron_h),
    "nemotron_h_moe": GgufFamily(recurrent.nemotron_h),
    "nomic-bert": GgufFamily(dense.nomic_bert),
    "olmo": GgufFamily(dense.olmo, _ROTATED),
    "olmo2": GgufFamily(dense.olmo2),
    "olmoe": GgufFamily(mixtures.olmoe),
    "phi2": GgufFamily(dense.phi2),
    "phi3": GgufFamily(dense.phi3, _FUSED_HALVES),
    "phimoe": GgufFamily(mixtures.phimoe),
    "qwen2": GgufFamily(dense.qwen2),
    "qwen2moe": GgufFamily(mixtures.qwen2_moe),
    "qwen2vl": GgufFamily(dense.qwen2_vl),
    "qwen3": GgufFamily(dense.qwen3),
    "qwen3moe": GgufFamily(mixtures.qwen3_moe),
    "qwen35": GgufFamily(recurrent.qwen3_5, _QWEN35),
    "qwen35moe": GgufFamily(recurrent.qwen3_5_moe, _QWEN35),
    "qwen3next": GgufFamily(recurrent.qwen3_next, _DELTA),
    "qwen3vl": GgufFamily(dense.qwen3_vl),
    "qwen3vlmoe": GgufFamily(mixtures.qwen3_vl_moe),
    "seed_oss": GgufFamily(dense.seed_oss),
    "smollm3": GgufFamily(dense.smollm3, _ROTATED),
    "stablelm": GgufFamily(dense.stablelm),
    "starcoder": GgufFamily(dense.starcoder),
    "starcoder2": GgufFamily(dense.starcoder2),
}


def describe(header: GgufHeader, floats: Callable[[str], list[float]]) -> tuple[Config, TensorRules]:
    """Return the config.json of a file's model, and how its tensors are named and stored.

    Raises:
        ModelError: The architecture, or a key, is not understood; names it.
    """
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model" or name == "clip":
        raise ModelError(
            f"{header.path}: general.type: {header.metadata.get('general.type')!r} ({name}) is no language model, as "
            "files named mmproj are not; pass the model's own file"
        )
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelError(
            f"{header.path}: general.architecture: {name!r} is not supported, only {', '.join(sorted(_FAMILIES))}; "
            "use the model's safetensors directory"
        )
    prefix = f"{name}."
    values = {
        key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)
    }
    keys = ConfigFile(header.path, values, section=prefix)
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{header.path}: token_embd.weight: is missing")
    model = GgufModel(keys, header.tensors, floats)
    config = _ends(model, header) | family.describe(model)
    keys.pass_over(*_HARMLESS)
    keys.refuse_unread()
    return config, family.rules


def _ends(model: GgufModel, header: GgufHeader) -> Config:
    """Return the keys that every config.json has."""
    embedding = model.tensors["token_embd.weight"]
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": model.keys.integer("embedding_length"),
        "num_hidden_layers": model.num_layers,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": "bfloat16",  # quantized weights have none; this is what most were made from
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }
