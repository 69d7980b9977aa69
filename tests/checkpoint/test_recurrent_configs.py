"""config.json of families with recurrent states: what is read, in the ways that programs write it, and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from triptych.checkpoint.architecture import ExpertsSpec, ModelArchitecture, StateSpec
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.mtp import find_mtp
from triptych.errors import FeatureDisabled, ModelError

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
QWEN = SIZES | {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
}
SHARED = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
}
MAMBA2 = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 32,
    "chunk_size": 256,
    "rms_norm": True,
    "norm_before_gate": False,
    "residual_in_fp32": True,
    "time_step_rank": 160,
}
NEMOTRON = SIZES | {
    "hybrid_override_pattern": "M-M*-",
    "attention_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}


def read(directory: Path, name: str, values: dict[str, Any]) -> ModelArchitecture:
    (directory / "config.json").write_text(json.dumps({"architectures": [name], **values}))
    return read_architecture(directory)


def kinds(architecture: ModelArchitecture) -> list[str]:
    return [layer.state.kind if layer.state else layer.attention for layer in architecture.layers]


@pytest.mark.parametrize("listed", [False, True])
def test_every_fourth_layer_of_qwen_attends(listed: bool, tmp_path: Path) -> None:
    types = {"layer_types": ([LINEAR] * 3 + [FULL]) * 2} if listed else {}
    architecture = read(tmp_path, "Qwen3NextForCausalLM", QWEN | SHARED | types)
    assert kinds(architecture) == (["gated_delta"] * 3 + ["full"]) * 2
    assert (architecture.num_kv_heads, architecture.head_dim) == (2, 32)
    assert architecture.layers[3].rope is not None
    assert architecture.layers[3].rope.rotary_dim == 8
    state, experts = architecture.layers[0].state, architecture.layers[0].experts
    assert state is not None
    assert experts is not None
    # keys and queries of 2 heads of 16, values of 4 heads of 8; 3 past inputs
    assert (state.conv_channels, state.page_elements) == (96, 3 * 96 + 4 * 16 * 8)
    assert (experts.num_experts, experts.shared_size, experts.has_shared_gate) == (6, 48, True)


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_the_text_part_of_qwen_3_5_is_read(name: str, tmp_path: Path) -> None:
    rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_theta": 1e7, "rope_type": "default"}
    text = {key: value for key, value in QWEN.items() if key not in ("rope_theta", "partial_rotary_factor")}
    text |= {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "attn_output_gate": True}
    text |= SHARED if "Moe" in name else {}
    vision = {"vision_config": {"depth": 3}, "image_token_id": 9, "video_token_id": 8}
    architecture = read(tmp_path, name, {"text_config": text, **vision, "tie_word_embeddings": False})
    assert kinds(architecture)[2:5] == ["gated_delta", "full", "gated_delta"]
    assert architecture.names.stored("model.norm.weight") == "model.language_model.norm.weight"
    held = architecture.names.holder("model.layers.0.mixer.in_k.weight")
    assert held.name == "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    assert architecture.block.output_gate == "elements"


def test_experts_are_named_as_the_files_have_them(tmp_path: Path) -> None:
    """Those of Qwen 3.5 are in one tensor as it is published, and one by one as others write it."""
    name, config = (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": QWEN | SHARED | {"attn_output_gate": True}},
    )
    ours, layer = "model.layers.0.mlp.experts.3.up_proj.weight", "model.language_model.layers.0.mlp.experts"
    one_by_one = (f"{layer}.3.up_proj.weight", "mtp.layers.0.mlp.experts.gate_up_proj")
    for stored in ((), one_by_one):
        save_file({key: torch.zeros(1) for key in stored}, tmp_path / "model.safetensors")
        assert read(tmp_path, name, config).names.holder(ours).name == one_by_one[0]
    save_file({f"{layer}.gate_up_proj": torch.zeros(1)}, tmp_path / "model.safetensors")
    names = read(tmp_path, name, config).names
    assert names.holder(ours).name == f"{layer}.gate_up_proj"
    assert names.of_files(one_by_one).holder(ours).name == one_by_one[0]


def test_layers_that_guess_are_found_beside_the_others(tmp_path: Path) -> None:
    """Files of Qwen3-Next do not name theirs."""
    for values, count in ((SHARED, 1), (SHARED | {"num_nextn_predict_layers": 2}, 2)):
        spec = find_mtp(read(tmp_path, "Qwen3NextForCausalLM", QWEN | values))
        assert spec is not None
        assert (spec.num_layers, spec.layer.attention, spec.module("fc")) == (count, "full", "mtp.fc")
        assert [spec.holds(f"{name}.weight") for name in ("mtp.norm", "mtp.embed_tokens")] == [True, True]
        assert not any(spec.holds(f"{name}.1.norm.weight") for name in ("mtp.layers", "model.layers"))
    text = QWEN | {
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
    }
    assert find_mtp(read(tmp_path, "Qwen3_5ForConditionalGeneration", {"text_config": text})) is None
    text["mtp_num_hidden_layers"] = 5000
    with pytest.raises(ModelError, match=r"text_config\.mtp_num_hidden_layers: 5000 is above the limit 4096"):
        read(tmp_path, "Qwen3_5ForConditionalGeneration", {"text_config": text})


OLMO_HYBRID = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 3840, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": ([LINEAR] * 3 + [FULL]) * 8, "linear_a_log_max": 16.0, "linear_a_log_min": 0.0,
    "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_dt_init_floor": 0.0001,
    "linear_dt_max": 0.1, "linear_dt_min": 0.001, "linear_key_head_dim": 96, "linear_num_key_heads": 30,
    "linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings": 65536,
    "num_attention_heads": 30, "num_hidden_layers": 32, "num_key_value_heads": 30, "pad_token_id": 100277,
    "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352,
}  # fmt: skip


def test_olmo_hybrid_is_read_as_published(tmp_path: Path) -> None:
    """As in Olmo Hybrid 7B; sizes of its delta nets are those that follow from the others."""
    sizes = {
        key for key in OLMO_HYBRID if key.startswith("linear_") and key.endswith(("_heads", "_head_dim"))
    }
    others = {key: OLMO_HYBRID[key] for key in OLMO_HYBRID.keys() - sizes - {"layer_types"}}
    for values in (OLMO_HYBRID, others, OLMO_HYBRID | dict.fromkeys(sizes)):
        architecture = read(tmp_path, "OlmoHybridForCausalLM", values)
        assert kinds(architecture) == (["gated_delta"] * 3 + ["full"]) * 8
        assert architecture.layers[0].state == StateSpec(
            "gated_delta", 4, 30, 192, 30, 96, norm="before_gate", norm_eps=1e-5, beta_scale=2.0
        )
        assert [layer.norms for layer in architecture.layers] == ["pre", "pre", "pre", ""] * 8
        assert {layer.rope for layer in architecture.layers} == {None}
        assert (architecture.block.norms, architecture.block.qk_norm) == ("post", "all")


def test_names_of_olmo_hybrid_are_the_published_ones(tmp_path: Path) -> None:
    names = read(tmp_path, "OlmoHybridForCausalLM", OLMO_HYBRID).names
    layer = "model.layers.31"
    for own, published in {
        "mixer.in_z.weight": "linear_attn.g_proj.weight",
        "mixer.in_a.weight": "linear_attn.a_proj.weight",
        "mixer.conv_k.weight": "linear_attn.k_conv1d.weight",
        "mixer.norm.weight": "linear_attn.o_norm.weight",
        "mixer.out_proj.weight": "linear_attn.o_proj.weight",
        "mixer.A_log": "linear_attn.A_log",
        "input_layernorm.weight": "attention_layer_norm.weight",
        "post_attention_layernorm.weight": "feedforward_layer_norm.weight",
        "post_feedforward_layernorm.weight": "post_feedforward_layernorm.weight",
    }.items():
        assert names.holder(f"{layer}.{own}").name == names.current(f"{layer}.{published}")
    of_body = "layers.31.attention_layer_norm.weight"
    assert names.current(of_body) == "model.layers.31.input_layernorm.weight"


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({"rope_theta": None}, None),
        ({}, 10000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, 1000.0),
    ],
    ids=str,
)
def test_a_null_base_says_that_there_are_no_positions(
    values: dict[str, Any], theta: float | None, tmp_path: Path
) -> None:
    """And one that is absent is 10,000, as for the config class of transformers."""
    others = {key: value for key, value in OLMO_HYBRID.items() if key != "rope_parameters"}
    rope = read(tmp_path, "OlmoHybridForCausalLM", others | values).layers[3].rope
    assert (None if rope is None else rope.theta) == theta


@pytest.mark.parametrize("infinity", ["Infinity", {"__float__": "Infinity"}, math.inf], ids=str)
def test_limits_of_step_sizes_are_read(infinity: Any, tmp_path: Path) -> None:
    limits = {"time_step_limit": [0.25, infinity]}
    (layer, *_) = read(tmp_path, "Mamba2ForCausalLM", MAMBA2 | limits).layers
    assert layer.state is not None
    assert layer.state.dt_limits == (0.25, math.inf)
    assert (layer.attention, layer.mlp, layer.num_kv_heads) == ("none", "none", 0)


@pytest.mark.parametrize("limits", [[1.0], [2.0, 1.0], [-1.0, 1.0], [0.0, "many"], 3, [0.0, None]], ids=str)
def test_odd_limits_are_refused(limits: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="time_step_limit: "):
        read(tmp_path, "Mamba2ForCausalLM", MAMBA2 | {"time_step_limit": limits})


def test_layers_of_nemotron_are_one_block_each(tmp_path: Path) -> None:
    values = {key: value for key, value in NEMOTRON.items() if key != "attention_head_dim"} | {"head_dim": 16}
    architecture = read(tmp_path, "NemotronHForCausalLM", values)
    assert kinds(architecture) == ["mamba2", "none", "mamba2", "full", "none"]
    assert [layer.mlp for layer in architecture.layers] == ["none", "plain", "none", "none", "plain"]
    with pytest.raises(ModelError, match=r"layers_block_type: .* must be a list of"):
        read(tmp_path, "NemotronHForCausalLM", values | {"hybrid_override_pattern": "M?"})


def test_experts_of_nemotron_have_no_gate(tmp_path: Path) -> None:
    """Those of Nemotron 3 Nano."""
    values = {
        "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128,
        "hidden_size": 2688, "hybrid_override_pattern": "ME*E", "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
        "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_logits_to_keep": 1,
        "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
        "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001,
        "topk_group": 1, "use_bias": False, "use_cache": True, "use_conv_bias": True,
        "use_mamba_kernels": True, "vocab_size": 131072,
    }  # fmt: skip
    architecture = read(tmp_path, "NemotronHForCausalLM", values)
    assert kinds(architecture) == ["mamba2", "none", "full", "none"]
    assert [layer.mlp for layer in architecture.layers] == ["none", "experts", "none", "experts"]
    layer = architecture.layers[1]
    assert layer.intermediate_size == 1856
    assert layer.experts == ExpertsSpec(
        128,
        6,
        score="sigmoid",
        scale=2.5,
        group_experts=2,
        correction_shape=(128,),
        shared_size=3712,
        is_gated=False,
    )
    latent = values | {"moe_latent_size": 1024}  # as Nemotron 3 Super
    latent_layer = read(tmp_path, "NemotronHForCausalLM", latent).layers[1]
    assert latent_layer.experts == replace(layer.experts, latent_size=1024)
    with pytest.raises(FeatureDisabled, match=r"mlp_bias = True: .* around experts have biases"):
        read(tmp_path, "NemotronHForCausalLM", latent | {"mlp_bias": True})
    with pytest.raises(ModelError, match=r"moe_latent_size: -1 must be an integer >= 0"):
        read(tmp_path, "NemotronHForCausalLM", values | {"moe_latent_size": -1})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Mamba2ForCausalLM", MAMBA2 | {"num_heads": 7}, "num_heads: 7 times head_dim 16"),
        ("Mamba2ForCausalLM", MAMBA2 | {"n_groups": 3}, "n_groups: 3 must divide"),
        (
            "Qwen3NextForCausalLM",
            QWEN | SHARED | {"linear_num_value_heads": 3},
            "must be a multiple of 2 key",
        ),
        (
            "Qwen3NextForCausalLM",
            QWEN | SHARED | {"layer_types": ["linear"] * 8},
            "is none of full_attention",
        ),
        ("Qwen3NextForCausalLM", QWEN | SHARED | {"novelty": 1}, "novelty"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, name, values)


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureDisabled, match="norm_before_gate = True"):
        read(tmp_path, "Mamba2ForCausalLM", MAMBA2 | {"norm_before_gate": True})
    falcon = SIZES | {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}
    with pytest.raises(FeatureDisabled, match="mamba_norm_before_gate = True"):
        read(tmp_path, "FalconH1ForCausalLM", falcon | {"mamba_rms_norm": True})


LFM2 = SIZES | {
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_heads": 4,
    "use_pos_enc": True,
}


def test_lfm2_is_read_as_published(tmp_path: Path) -> None:
    """As in LFM2 1.2B: the list of layers that attend, and columns before they are cut and rounded."""
    of_blocks = {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [2],
        "num_hidden_layers": 4,
    }
    architecture = read(tmp_path, "Lfm2ForCausalLM", LFM2 | of_blocks)
    assert kinds(architecture) == ["short_conv", "short_conv", "full", "short_conv"]
    assert {layer.intermediate_size for layer in architecture.layers} == {8192}


def test_experts_of_lfm2_are_read_as_published(tmp_path: Path) -> None:
    """As in LFM2 8B A1B: dense layers first, sigmoids with a correction, renormalized."""
    of_experts = {
        "layer_types": ["conv", "conv", FULL, "conv"],
        "num_hidden_layers": 4,
        "num_dense_layers": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }
    architecture = read(tmp_path, "Lfm2MoeForCausalLM", LFM2 | of_experts)
    chosen = ExpertsSpec(32, 4, score="sigmoid", correction_shape=(32,))
    assert [layer.experts for layer in architecture.layers] == [None, None, chosen, chosen]
    assert [layer.intermediate_size for layer in architecture.layers] == [96, 96, 32, 32]
    with pytest.raises(ModelError, match=r"num_experts_per_tok: 40 must be at most num_experts 32"):
        read(tmp_path, "Lfm2MoeForCausalLM", LFM2 | of_experts | {"num_experts_per_tok": 40})


def test_lfm2_without_rotated_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureDisabled, match=r"use_pos_enc = False: .*positions are not rotated"):
        read(tmp_path, "Lfm2ForCausalLM", LFM2 | {"num_hidden_layers": 2, "use_pos_enc": False})
