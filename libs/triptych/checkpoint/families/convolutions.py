"""Families with short convolutions in most layers: LFM2 and LFM3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    LayerSpec,
    ModelArchitecture,
    NormSpec,
    RopeParameters,
    StateSpec,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    Sizes,
    describe,
    describe_layers,
    read_experts,
    read_rope,
    read_sizes,
    read_window,
    with_dense_layers,
)
from triptych.checkpoint.families.recurrent import parts_of_mixer, with_states
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import TensorNames

_CONV = "conv"
_NAMES = (
    ("model.norm", "model.embedding_norm"),
    ("input_layernorm", "operator_norm"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
    (".mlp.", ".feed_forward."),
    (".mixer.conv1d", ".conv.conv"),
    (".mixer.", ".conv."),
)
"""Names of both: what a tensor is called here, and in the files."""


def lfm2(config: ConfigFile) -> ModelArchitecture:
    """Read LFM2: layers attend or have a short convolution, with one MLP in each or with experts."""
    config.assume(rope_theta=1000000.0)
    sizes = read_sizes(config)
    full = config.indices("full_attn_idxs", length=sizes.num_layers)
    if config.has("layer_types"):
        kinds = config.words("layer_types", length=sizes.num_layers, among=(FULL, _CONV))
    else:
        kinds = tuple(FULL if index in full else _CONV for index in range(sizes.num_layers))
    config.pass_over("num_heads")  # those of attention, once more
    config.expect("use_pos_enc", True, otherwise="positions are not rotated")
    has_experts = architecture_name(config) == "Lfm2MoeForCausalLM"
    layers = _with_convolutions(
        config, sizes, (_lfm2_mixtures if has_experts else _lfm2_mlps)(config, sizes), kinds
    )
    norm = NormSpec(eps=config.number("norm_eps", default=1e-5))
    names = TensorNames(
        renamed=(
            (".self_attn.o_proj", ".self_attn.out_proj"),
            (".q_norm", ".q_layernorm"),
            (".k_norm", ".k_layernorm"),
            ("post_attention_layernorm", "ffn_norm"),
            (".gate_proj", ".w1"),
            (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
            *_NAMES,
        ),
        fused=parts_of_mixer("short_conv", "conv"),
    )
    is_tied = config.boolean("tie_embedding", default=True)
    block = BlockSpec(norm=norm, qk_norm="head", qk_norm_spec=norm)
    return describe(config, sizes, layers=layers, block=block, names=names, is_tied=is_tied)


def lfm3(config: ConfigFile) -> ModelArchitecture:
    """Read LFM3: layers attend, to everything or to a window, or have a short convolution."""
    config.assume(head_dim=128, sliding_window=256, conv_L_cache=7)
    sizes = read_sizes(config)
    kinds = tuple(
        FULL if index % 4 == 2 else SLIDING if index % 4 == 0 and index else _CONV
        for index in range(sizes.num_layers)
    )
    if config.has("layer_types"):
        kinds = config.words("layer_types", length=sizes.num_layers, among=(FULL, SLIDING, _CONV))
    config.expect("attention_bias", False, otherwise="the attention has biases")
    ropes = _lfm3_ropes(config, sizes, kinds)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: ropes.get(kind),
        layer_types=tuple(FULL if kind == _CONV else kind for kind in kinds),
        window=read_window(config, kinds),
    )
    norm = NormSpec(eps=config.number("norm_eps", default=1e-5))
    has_norms_behind = config.boolean("use_sandwich_norm", default=True)
    behind = (
        ("post_attention_layernorm", "post_operator_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffn_norm"),
    )
    names = TensorNames(
        renamed=(
            *(behind if has_norms_behind else (("post_attention_layernorm", "ffn_norm"),)),
            (".mlp.gate_proj", ".mlp.w1"),
            *_NAMES,
        ),
        fused=parts_of_mixer("short_conv", "conv"),
    )
    block = BlockSpec(
        norm=norm,
        norms="both" if has_norms_behind else "pre",
        qk_norm="head",
        qk_norm_spec=norm,
        output_gate="heads" if config.boolean("use_attention_gate", default=True) else "none",
    )
    layers = _with_convolutions(config, sizes, layers, kinds)
    return describe(config, sizes, layers=layers, block=block, names=names, is_tied=True)


def _lfm3_ropes(config: ConfigFile, sizes: Sizes, kinds: Sequence[str]) -> dict[str, RopeParameters]:
    """Read how each kind of attention rotates; where a file says nothing, full attention half of a head."""
    if not config.has("rope_parameters"):
        config.assume(
            rope_parameters={
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
            }
        )
    ropes = config.section("rope_parameters")
    if ropes is not None:
        ropes.pass_over(*(kind for kind in (SLIDING, FULL) if kind not in kinds))
    return {kind: read_rope(config, sizes, layer_type=kind) for kind in (SLIDING, FULL) if kind in kinds}


def _with_convolutions(
    config: ConfigFile, sizes: Sizes, layers: Sequence[LayerSpec], kinds: Sequence[str]
) -> tuple[LayerSpec, ...]:
    """Return the layers with a short convolution in place of attention where their kind says so."""
    bias = config.boolean("conv_bias", default=False)
    state = StateSpec(
        kind="short_conv",
        taps=config.integer("conv_L_cache", default=3, minimum=2),
        num_heads=1,
        value_dim=sizes.hidden_size,
        conv_bias=bias,
        bias=bias,
    )
    return with_states(layers, {index: state for index, kind in enumerate(kinds) if kind == _CONV})


def _lfm2_mlps(config: ConfigFile, sizes: Sizes) -> tuple[LayerSpec, ...]:
    config.pass_over("conv_dim", "conv_dim_out", "block_dim", "block_mlp_init_scale", "block_norm_eps")
    config.pass_over(
        "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init"
    )
    return describe_layers(sizes, intermediate_size=_lfm2_width(config), rope=read_rope(config, sizes))


def _lfm2_mixtures(config: ConfigFile, sizes: Sizes) -> tuple[LayerSpec, ...]:
    experts = replace(
        read_experts(config, "num_experts", renormalize=config.boolean("norm_topk_prob", default=True)),
        score="sigmoid",
        scale=config.positive("routed_scaling_factor", default=1.0),
    )
    if config.boolean("use_expert_bias", default=True):
        experts = replace(experts, correction_shape=(experts.num_experts,))
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("moe_intermediate_size"),
        rope=read_rope(config, sizes),
        experts=experts,
    )
    num_dense = config.integer("num_dense_layers", default=2, minimum=0)
    return with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))


def _lfm2_width(config: ConfigFile) -> int:
    """Return the columns of the MLP, which files give before it is cut to two thirds and rounded."""
    key = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    config.pass_over("intermediate_size")
    width, multiple = config.integer(key), config.integer("block_multiple_of", default=256)
    factor = config.number("block_ffn_dim_multiplier", default=1.0)
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    return multiple * math.ceil(int(factor * int(2 * width / 3)) / multiple)
