"""Families with recurrent states: Qwen3-Next and 3.5, OLMo Hybrid, Mamba 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triptych.checkpoint.architecture import (
    BlockSpec,
    ExpertsSpec,
    LayerSpec,
    ModelArchitecture,
    NormSpec,
    RopeParameters,
    StateSpec,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    STACKED_EXPERTS,
    Sizes,
    describe,
    describe_layers,
    read_experts,
    read_qwen_dense_layers,
    read_rope,
    read_sizes,
    with_dense_layers,
)
from triptych.checkpoint.families.llama import rms_block
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

LINEAR = "linear_attention"
_UNBOUNDED_POSITIONS = 131072  # where a file names no limit, since there is none
MIXER_ONLY: Mapping[str, Any] = {
    "num_heads": 0,
    "num_kv_heads": 0,
    "head_dim": 0,
    "attention": "none",
    "rope": None,
}
"""Fields of a layer without attention."""
OF_TRAINING = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme"),
    *(
        "rescale_prenorm_residual",
        "use_mambapy",
        "use_falcon_mambapy",
        "use_associative_scan",
        "use_mamba_kernels",
    ),
    *("chunk_size", "mamba_chunk_size", "residual_in_fp32", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
)
"""Keys about the beginning of training, and about how other programs compute."""


def with_states(layers: Sequence[LayerSpec], states: Mapping[int, StateSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with a mixer in place of attention where there is one, by the layer's index."""
    return tuple(
        replace(layer, **MIXER_ONLY, state=states[index]) if index in states else layer
        for index, layer in enumerate(layers)
    )


def read_limits(config: ConfigFile) -> tuple[float, float]:
    """Return the limits of the step sizes; JSON has no infinity, so that programs write it in their own ways."""
    key = "time_step_limit"
    config.pass_over(key)
    given = config.values.get(key)
    if given is None:
        return 0.0, math.inf
    infinite = ("inf", "Infinity", {"__float__": "Infinity"}, math.inf)
    if not isinstance(given, list) or len(given) != 2:
        config.fail(key, given, "must be a list of two numbers")
    low, high = (math.inf if each in infinite else each for each in given)
    if type(low) not in (int, float) or type(high) not in (int, float) or not 0 <= low <= high:
        config.fail(key, given, "must be two numbers, from 0 on, in their order")
    return float(low), float(high)


def check_groups(config: ConfigFile, key: str, state: StateSpec) -> StateSpec:
    """Check that groups of B and C divide the heads, and return the state.

    Raises:
        ModelError: They do not; names both.
    """
    if state.num_heads % state.num_key_heads:
        config.fail(key, state.num_key_heads, f"must divide the {state.num_heads} heads of the mixer")
    return state


def parts_of_mixer(kind: str, module: str) -> tuple[FusedTensor, ...]:
    """Return the tensors of a mixer that hold what ranks share each by itself.

    Args:
        kind: As of `StateSpec`; all but gated_delta.
        module: Name of the mixer in the checkpoint, as it follows the layer's prefix.
    """
    entering = {
        "mamba2": ("gate", "x", "b", "c", "dt"),
        "mamba": ("x", "gate"),
        "short_conv": ("b", "c", "x"),
    }
    entering_parts = tuple(f"mixer.in_{part}" for part in entering[kind])
    convolved = FusedTensor(f"{module}.conv1d", ("mixer.conv_x", "mixer.conv_b", "mixer.conv_c"))
    return (FusedTensor(f"{module}.in_proj", entering_parts), *((convolved,) if kind == "mamba2" else ()))


def read_dt_rank(config: ConfigFile, key: str, hidden_size: int) -> int:
    """Return the rank of the projection to step sizes; auto: a sixteenth of the hidden size."""
    config.pass_over(key)
    return -(-hidden_size // 16) if config.values.get(key, "auto") == "auto" else config.integer(key)


def _read_types(config: ConfigFile, num_layers: int, *, linear: str = LINEAR) -> tuple[str, ...]:
    """Return the kinds of layers; without a list, every fourth one attends, or as `full_attention_interval` says."""
    every = config.integer("full_attention_interval", default=4)
    if config.has("layer_types"):
        return config.words("layer_types", length=num_layers, among=(FULL, linear))
    return tuple(linear if (index + 1) % every else FULL for index in range(num_layers))


def _gated_delta(
    config: ConfigFile,
    *,
    num_heads: int = 32,
    num_key_heads: int = 16,
    key_dim: int = 128,
    value_dim: int = 128,
) -> StateSpec:
    """Read the sizes of a gated delta net, of which the family's defaults are given."""
    spec = StateSpec(
        kind="gated_delta",
        taps=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
        num_heads=config.integer("linear_num_value_heads", default=num_heads),
        value_dim=config.integer("linear_value_head_dim", default=value_dim),
        num_key_heads=config.integer("linear_num_key_heads", default=num_key_heads),
        key_dim=config.integer("linear_key_head_dim", default=key_dim),
        norm="before_gate",
    )
    if spec.num_heads % spec.num_key_heads:
        config.fail(
            "linear_num_value_heads", spec.num_heads, f"must be a multiple of {spec.num_key_heads} key heads"
        )
    return spec


def _qwen(
    config: ConfigFile,
    sizes: Sizes,
    rope: RopeParameters,
    names: TensorNames,
    *,
    experts: ExpertsSpec | None = None,
) -> ModelArchitecture:
    """Describe what Qwen3-Next and Qwen 3.5 have in common: most layers have a gated delta net in place of attention.

    Args:
        experts: The mixture of the layers that have one; None: there are none.
    """
    kinds = _read_types(config, sizes.num_layers)
    state = _gated_delta(config)
    config.expect("hidden_act", "silu", otherwise="the convolution of this family has another activation")
    width = "intermediate_size" if experts is None else "moe_intermediate_size"
    layers = describe_layers(sizes, intermediate_size=config.integer(width), rope=rope, experts=experts)
    if experts is not None:
        dense_width = config.integer("intermediate_size", default=5632)
        layers = with_dense_layers(layers, dense_width, read_qwen_dense_layers(config, sizes.num_layers))
    layers = with_states(layers, {index: state for index, kind in enumerate(kinds) if kind == LINEAR})
    norm = NormSpec(eps=config.number("rms_norm_eps", default=1e-6), offset=1.0)
    bias = config.boolean("attention_bias", default=False)
    block = BlockSpec(
        norm=norm, qk_norm="head", qk_norm_spec=norm, qkv_bias=bias, out_bias=bias, output_gate="elements"
    )
    own = (
        FusedTensor(
            "self_attn.q_proj",
            ("self_attn.q_proj", "self_attn.gate_proj"),
            interleaved="groups",
            num_groups=sizes.num_heads,
        ),
        FusedTensor("linear_attn.conv1d", ("mixer.conv_q", "mixer.conv_k", "mixer.conv_v")),
    )
    names = replace(
        names,
        renamed=(*names.renamed, (".mixer.", ".linear_attn."), (".shared_experts.", ".shared_expert.")),
        fused=(*names.fused, *own),
        fused_in_some=STACKED_EXPERTS,
        ignored_prefixes=(*_further_layers(config), *names.ignored_prefixes),
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


def _further_layers(config: ConfigFile) -> tuple[str, ...]:
    """Return the beginnings of layers that predict further tokens, and of what is beside them.

    Files of Qwen3-Next have such a layer and no key that says so.
    """
    default = config.integer("num_nextn_predict_layers", default=1, minimum=0)
    num_further = config.integer("mtp_num_hidden_layers", default=default, minimum=0)
    config.pass_over("mtp_use_dedicated_embeddings")  # which would have a tensor
    return (*(f"mtp.layers.{index}." for index in range(num_further)), "mtp.")


def qwen3_next(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, default_head_dim=256)
    groups = config.integer("linear_num_key_heads", default=16)
    names = TensorNames(
        fused=tuple(
            FusedTensor(
                f"linear_attn.{name}",
                tuple(f"mixer.in_{part}" for part in parts),
                interleaved="groups",
                num_groups=groups,
            )
            for name, parts in (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba"))
        ),
    )
    rope, experts = (
        read_rope(config, sizes, partial=0.25),
        _shared_experts(config, num_experts=512, chosen=10),
    )
    return _qwen(config, sizes, rope, names, experts=experts)


def _shared_experts(config: ConfigFile, *, num_experts: int, chosen: int) -> ExpertsSpec | None:
    """Read a mixture beside an expert of all tokens, which has a gate; None where there are no experts.

    Args:
        num_experts, chosen: The family's defaults.
    """
    if config.values.get("num_experts") == 0:
        config.pass_over(
            *("num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
            *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
        )
        return None
    config.assume(num_experts=num_experts, num_experts_per_tok=chosen, moe_intermediate_size=512)
    return replace(
        read_experts(config, "num_experts", renormalize=config.boolean("norm_topk_prob", default=True)),
        shared_size=config.integer("shared_expert_intermediate_size", default=512),
        has_shared_gate=True,
    )


_QWEN3_5_FUSED = (
    FusedTensor("linear_attn.in_proj_qkv", ("mixer.in_q", "mixer.in_k", "mixer.in_v")),
    *(FusedTensor(f"linear_attn.in_proj_{part}", (f"mixer.in_{part}",)) for part in "zba"),
)


def qwen3_5(config: ConfigFile) -> ModelArchitecture:
    return _qwen3_5(config, TensorNames(fused=_QWEN3_5_FUSED))


def qwen3_5_moe(config: ConfigFile) -> ModelArchitecture:
    return _qwen3_5(config, TensorNames(fused=_QWEN3_5_FUSED), has_experts=True)


def _qwen3_5(config: ConfigFile, names: TensorNames, *, has_experts: bool = False) -> ModelArchitecture:
    config.expect("attn_output_gate", True, otherwise="the attention has no gate")
    config.pass_over("mamba_ssm_dtype")  # states are float32 in any case
    sizes = read_sizes(config, default_head_dim=256)
    experts = _shared_experts(config, num_experts=256, chosen=8) if has_experts else None
    return _qwen(config, sizes, _text_rope(config, sizes), names, experts=experts)


def qwen3_5_with_images(config: ConfigFile) -> ModelArchitecture:
    config.pass_over(
        *(
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
        ),
        "tie_word_embeddings",
    )
    names = TensorNames(
        renamed=(("model.", "model.language_model."),),
        fused=_QWEN3_5_FUSED,
        ignored_prefixes=("model.visual.",),
    )
    has_experts = architecture_name(config).startswith("Qwen3_5Moe")
    return _qwen3_5(config.text_section(), names, has_experts=has_experts)


def _text_rope(config: ConfigFile, sizes: Sizes) -> RopeParameters:
    """Read a rope with three positions for each token, of which those of text are equal."""
    found = read_rope(config, sizes, partial=0.25)
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    if rope is not None:
        rope.pass_over("mrope_section", "mrope_interleaved")
    return found


def olmo_hybrid(config: ConfigFile) -> ModelArchitecture:
    """Read OLMo Hybrid: OLMo 2's attention, with norms after blocks, and gated delta nets, with norms before them."""
    sizes = read_sizes(config)
    key_heads = config.integer("linear_num_key_heads", default=sizes.num_heads)
    key_dim = config.integer("linear_key_head_dim", default=int(0.75 * sizes.hidden_size / key_heads))
    state = _gated_delta(
        config, num_heads=sizes.num_heads, num_key_heads=key_heads, key_dim=key_dim, value_dim=2 * key_dim
    )
    config.expect("hidden_act", "silu", otherwise="the convolution of this family has another activation")
    # of the beginning of training
    config.pass_over("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
    config.pass_over("linear_dt_init_floor")
    has_turns = config.boolean("linear_allow_neg_eigval", default=True)
    state = replace(state, norm_eps=1e-5, beta_scale=2.0 if has_turns else 1.0)
    rope = None if _lacks_positions(config) else read_rope(config, sizes)
    layers = describe_layers(sizes, intermediate_size=config.integer("intermediate_size"), rope=rope)
    kinds = _read_types(config, sizes.num_layers)
    layers = with_states(layers, {index: state for index, kind in enumerate(kinds) if kind == LINEAR})
    layers = tuple(replace(layer, norms="pre") if layer.state else layer for layer in layers)
    bias = config.boolean("attention_bias", default=False)
    block = replace(rms_block(config), norms="post", qk_norm="all", qkv_bias=bias, out_bias=bias)
    names = replace(_OLMO_HYBRID_NAMES, older=_other_norms(sizes.num_layers))
    return describe(config, sizes, layers=layers, block=block, names=names)


def _lacks_positions(config: ConfigFile) -> bool:
    """Return whether the base of the rotary embedding is null, and not absent."""
    rope = config.section("rope_parameters") or config.section("rope_scaling") or config
    if rope.values.get("rope_theta", 0) is not None:
        return False
    rope.pass_over("rope_type", "type")
    return True


def _other_norms(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Return what files call norms of layers with a delta net, or of all layers -> the names of the modules.

    Those of a decoder's body are among them, which begin without `model.`.
    """
    renamed = {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    }
    return tuple(
        (f"{start}layers.{index}.{other}", f"model.layers.{index}.{own}")
        for start in ("model.", "")
        for index in range(num_layers)
        for other, own in renamed.items()
    )


_OLMO_HYBRID_NAMES = TensorNames(
    renamed=(
        *(
            (f".mixer.in_{own}", f".linear_attn.{part}_proj")
            for own, part in zip("qkvzab", "qkvgab", strict=True)
        ),
        *((f".mixer.conv_{part}", f".linear_attn.{part}_conv1d") for part in "qkv"),
        (".mixer.norm", ".linear_attn.o_norm"),
        (".mixer.out_proj", ".linear_attn.o_proj"),
        (".mixer.", ".linear_attn."),
    )
)


def mamba2(config: ConfigFile) -> ModelArchitecture:
    hidden_size, bias = config.integer("hidden_size"), config.boolean("use_bias", default=False)
    heads, head_dim = config.integer("num_heads", default=128), config.integer("head_dim", default=64)
    if config.integer("expand", default=2) * hidden_size != heads * head_dim:
        config.fail("num_heads", heads, f"times head_dim {head_dim} must be expand * hidden_size")
    groups = config.integer("n_groups", default=8)
    state = StateSpec(
        kind="mamba2",
        taps=config.integer("conv_kernel", default=4, minimum=2),
        num_heads=heads,
        value_dim=head_dim,
        num_key_heads=groups,
        key_dim=config.integer("state_size", default=128),
        conv_bias=config.boolean("use_conv_bias", default=True),
        bias=bias,
        norm_groups=groups,
        dt_limits=read_limits(config),
    )
    config.expect("norm_before_gate", False, otherwise="the norm comes before the gate")
    config.expect("rms_norm", True, otherwise="there is no norm beside the gate")
    return _mixers_only(config, check_groups(config, "n_groups", state), is_tied=False)


def mamba(config: ConfigFile) -> ModelArchitecture:
    hidden_size = config.integer("hidden_size")
    state = StateSpec(
        kind="mamba",
        taps=config.integer("conv_kernel", default=4, minimum=2),
        num_heads=1,
        value_dim=config.integer("expand", default=2) * hidden_size,
        key_dim=config.integer("state_size", default=16),
        conv_bias=config.boolean("use_conv_bias", default=True),
        bias=config.boolean("use_bias", default=False),
        dt_rank=read_dt_rank(config, "time_step_rank", hidden_size),
    )
    config.pass_over(
        "intermediate_size", "d_inner", "d_model", "n_layer", "ssm_cfg", "rms_norm", "fused_add_norm"
    )
    return _mixers_only(config, state, is_tied=True)


def _mixers_only(config: ConfigFile, state: StateSpec, *, is_tied: bool) -> ModelArchitecture:
    """Describe equal layers of a norm and a mixer."""
    config.pass_over("time_step_rank", *OF_TRAINING)
    config.expect("hidden_act", "silu", otherwise="the convolution of this family has another activation")
    sizes = Sizes(
        config.integer("hidden_size"), config.integer("num_hidden_layers"), 0, 0, 0, _UNBOUNDED_POSITIONS
    )
    layer = LayerSpec(**MIXER_ONLY, intermediate_size=0, mlp="none", state=state)
    norm = NormSpec(eps=config.number("layer_norm_epsilon", default=1e-5))
    names = TensorNames(
        renamed=(
            ("model.embed_tokens", "backbone.embeddings"),
            ("model.norm", "backbone.norm_f"),
            ("model.layers", "backbone.layers"),
            ("input_layernorm", "norm"),
        ),
        fused=parts_of_mixer(state.kind, "mixer"),
    )
    return describe(
        config,
        sizes,
        layers=(layer,) * sizes.num_layers,
        block=BlockSpec(norm=norm),
        names=names,
        is_tied=is_tied,
    )
