"""Families of Mamba layers beside attention: Bamba, Falcon-H1, Granite 4, Jamba, Nemotron-H."""

from __future__ import annotations

import math
from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    ExpertsSpec,
    LayerSpec,
    ModelArchitecture,
    NormSpec,
    StateSpec,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    describe,
    describe_layers,
    read_activation,
    read_experts,
    read_grouped_experts,
    read_rope,
    read_sizes,
)
from triptych.checkpoint.families.llama import granite_multipliers, rms_block
from triptych.checkpoint.families.recurrent import (
    LINEAR,
    MIXER_ONLY,
    OF_TRAINING,
    check_groups,
    parts_of_mixer,
    read_dt_rank,
    read_limits,
    with_states,
)
from triptych.checkpoint.families.shared_experts import GRANITE_EXPERTS
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames


def _mamba2_of_hybrid(config: ConfigFile, hidden_size: int, *, inner: int = 0) -> StateSpec:
    """Read the keys that begin with `mamba_`.

    Args:
        inner: Channels of the values; 0: `mamba_expand` times the hidden size.
    """
    config.pass_over(*OF_TRAINING)
    inner = inner or config.integer("mamba_expand", default=2) * hidden_size
    config.pass_over("mamba_expand")
    heads = config.integer("mamba_n_heads", default=128)
    if config.values.get("mamba_d_head", "auto") == "auto":
        config.pass_over("mamba_d_head")
        head_dim = inner // heads
    else:
        head_dim = config.integer("mamba_d_head")
    if heads * head_dim != inner:
        config.fail(
            "mamba_n_heads",
            heads,
            f"times mamba_d_head {head_dim} must be {inner}, the channels of the mixer",
        )
    state = StateSpec(
        kind="mamba2",
        taps=config.integer("mamba_d_conv", default=4, minimum=2),
        num_heads=heads,
        value_dim=head_dim,
        num_key_heads=config.integer("mamba_n_groups", default=1),
        key_dim=config.integer("mamba_d_state", default=256),
        conv_bias=config.boolean("mamba_conv_bias", default=True),
        bias=config.boolean("mamba_proj_bias", default=False),
        norm_groups=config.integer("mamba_n_groups", default=1),
        dt_limits=read_limits(config),
    )
    return check_groups(config, "mamba_n_groups", state)


def bamba(config: ConfigFile) -> ModelArchitecture:
    """Read Bamba, in which the layers of a list attend, and the others have Mamba 2."""
    sizes = read_sizes(config)
    attending = config.indices("attn_layer_indices", length=sizes.num_layers)
    state = _mamba2_of_hybrid(config, sizes.hidden_size)
    config.pass_over("z_loss_coefficient")
    # all heads are rotated by as many elements as the first files say
    rotated = config.optional_integer("attn_rotary_emb")
    rope = read_rope(config, sizes, partial=(rotated or sizes.head_dim) / sizes.head_dim)
    layers = with_states(
        describe_layers(sizes, intermediate_size=config.integer("intermediate_size"), rope=rope),
        {index: state for index in range(sizes.num_layers) if index not in attending},
    )
    bias = config.boolean("attention_bias", default=False)
    block = replace(
        rms_block(config, eps=1e-5),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
    names = TensorNames(
        renamed=(
            ("model.norm", "model.final_layernorm"),
            ("post_attention_layernorm", "pre_ff_layernorm"),
            (".mixer.", ".mamba."),
            (".mlp.", ".feed_forward."),
        ),
        fused=parts_of_mixer(state.kind, "mamba"),
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


def granite_hybrid(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    has_experts = config.integer("num_local_experts", default=8, minimum=0) > 0
    config.assume(num_local_experts=8, num_experts_per_tok=2)
    width = config.integer("shared_intermediate_size", default=1024)
    experts = replace(read_experts(config), shared_size=width) if has_experts else None
    config.pass_over("num_experts_per_tok", "intermediate_size", "normalization_function", "init_method")
    names = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    config.pass_over("layer_types")
    kinds = config.words(key, length=sizes.num_layers, among=names)
    state = _mamba2_of_hybrid(config, sizes.hidden_size)
    has_positions = config.text("position_embedding_type", default="") == "rope"
    rope = read_rope(config, sizes)
    layers = with_states(
        describe_layers(
            sizes,
            intermediate_size=config.integer("intermediate_size") if has_experts else width,
            rope=rope if has_positions else None,
            experts=experts,
        ),
        {index: state for index, kind in enumerate(kinds) if names[kind] == LINEAR},
    )
    block, ends = granite_multipliers(config)
    shared = "mlp.shared_experts" if has_experts else "mlp"
    tensors = TensorNames(
        renamed=(
            (".mixer.", ".mamba."),
            (".mlp.gate.", ".block_sparse_moe.router.layer."),
            (f".{shared}.down_proj.", ".shared_mlp.output_linear."),
        ),
        fused=(
            FusedTensor("shared_mlp.input_linear", (f"{shared}.gate_proj", f"{shared}.up_proj")),
            *(GRANITE_EXPERTS if has_experts else ()),
            *parts_of_mixer(state.kind, "mamba"),
        ),
    )
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=tensors)


def falcon_h1(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    inner = config.integer("mamba_d_ssm", default=1024) if config.has("mamba_d_ssm") else 0
    state = _mamba2_of_hybrid(config, sizes.hidden_size, inner=inner)
    has_norm = config.boolean("mamba_rms_norm", default=False)
    if config.boolean("mamba_norm_before_gate", default=True) and has_norm:
        config.assume(mamba_norm_before_gate=True)
        config.expect("mamba_norm_before_gate", False, otherwise="a norm of all channels before the gate")
    bias = config.boolean("attention_bias", default=False) or config.boolean("projectors_bias", default=False)
    entering = config.number("ssm_in_multiplier", default=1.0)
    attended = config.number("attention_in_multiplier", default=1.0)
    if (state.bias and entering != 1.0) or (bias and attended != 1.0):
        config.expect("mamba_proj_bias", False, otherwise="biases beside multipliers of what enters")
        config.expect("attention_bias", False, otherwise="biases beside multipliers of what enters")
    factors = config.numbers("ssm_multipliers", length=5) if config.has("ssm_multipliers") else (1.0,) * 5
    state = replace(
        state,
        norm="gated" if has_norm else "none",
        input_multipliers=tuple(entering * factor for factor in factors),
        output_multiplier=config.number("ssm_out_multiplier", default=1.0),
    )
    rope = read_rope(config, sizes)
    layers = tuple(
        replace(layer, state=state)
        for layer in describe_layers(sizes, intermediate_size=config.integer("intermediate_size"), rope=rope)
    )
    gate, down = config.numbers("mlp_multipliers", length=2) if config.has("mlp_multipliers") else (1.0, 1.0)
    if not gate:
        config.fail("mlp_multipliers", [gate, down], "must not begin with 0")
    # queries, keys and values are linear in what enters, and so are gate and up
    key_factor = config.number("key_multiplier", default=1.0)
    block = replace(
        rms_block(config, eps=1e-5),
        qkv_bias=bias,
        out_bias=config.boolean("attention_bias", default=False),
        mlp_bias=config.boolean("mlp_bias", default=False),
        attention_scale=sizes.head_dim**-0.5 * attended * attended * key_factor,
        attention_multiplier=attended * config.number("attention_out_multiplier", default=1.0),
        mlp_multipliers=(gate, down / gate),
    )
    ends = EndsSpec(
        embedding_multiplier=config.number("embedding_multiplier", default=1.0),
        logits_multiplier=config.number("lm_head_multiplier", default=1.0),
    )
    names = TensorNames(
        renamed=(
            (".mixer.", ".mamba."),
            ("post_attention_layernorm", "pre_ff_layernorm"),
            (".mlp.", ".feed_forward."),
            ("model.norm", "model.final_layernorm"),
        ),
        fused=parts_of_mixer(state.kind, "mamba"),
    )
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names)


_NEMOTRON_KINDS = {"M": LINEAR, "mamba": LINEAR, LINEAR: LINEAR, "*": FULL, "attention": FULL, FULL: FULL}
_NEMOTRON_KINDS |= {"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"}


def nemotron_h(config: ConfigFile) -> ModelArchitecture:
    pattern = config.values.get("hybrid_override_pattern")
    config.pass_over("hybrid_override_pattern")
    key = next((key for key in ("layers_block_type", "layer_types") if config.has(key)), "layers_block_type")
    listed = list(pattern) if isinstance(pattern, str) else config.values.get(key)
    config.pass_over("layers_block_type", "layer_types")
    if not isinstance(listed, list) or not all(kind in _NEMOTRON_KINDS for kind in listed):
        config.fail(key, listed, f"must be a list of {', '.join(_NEMOTRON_KINDS)}")
    kinds = [_NEMOTRON_KINDS[kind] for kind in listed]
    experts = _nemotron_experts(config) if "moe" in kinds else None
    config.pass_over(*(key for key in config.values if key.startswith(("moe_", "mtp_"))))
    config.pass_over(
        *("n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("num_nextn_predict_layers", "routed_scaling_factor", "topk_group"),
    )
    config.assume(num_hidden_layers=len(kinds))
    sizes = read_sizes(config, default_head_dim=128)
    heads, head_dim = (
        config.integer("mamba_num_heads", default=128),
        config.integer("mamba_head_dim", default=64),
    )
    groups, bias = config.integer("n_groups", default=8), config.boolean("use_bias", default=False)
    state = StateSpec(
        kind="mamba2",
        taps=config.integer("conv_kernel", default=4, minimum=2),
        num_heads=heads,
        value_dim=head_dim,
        num_key_heads=groups,
        key_dim=config.integer("ssm_state_size", default=128),
        conv_bias=config.boolean("use_conv_bias", default=True),
        bias=bias,
        norm_groups=groups,
        dt_limits=(config.number("time_step_min", default=0.001), math.inf),
    )
    check_groups(config, "n_groups", state)
    config.expect("mamba_hidden_act", "silu", otherwise="the convolution has another activation")
    config.expect("mamba_proj_bias", bias, otherwise="the mixer has biases that use_bias does not name")
    config.pass_over("expand", "time_step_limit", "sliding_window", *OF_TRAINING)
    config.pass_over("norm_eps", "partial_rotary_factor", "rope_theta")  # transformers reads none of them
    kind_to_layer = {
        # attention without positions
        FULL: LayerSpec(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, 0, rope=None, mlp="none"),
        LINEAR: LayerSpec(**MIXER_ONLY, intermediate_size=0, mlp="none", state=state),
        "mlp": LayerSpec(**MIXER_ONLY, intermediate_size=config.integer("intermediate_size"), mlp="plain"),
    }
    if experts is not None:
        width = config.integer("moe_intermediate_size", default=7688)
        kind_to_layer["moe"] = LayerSpec(
            **MIXER_ONLY, intermediate_size=width, mlp="experts", experts=experts
        )
    layers = tuple(kind_to_layer[kind] for kind in kinds)
    attention_bias = config.boolean("attention_bias", default=False)
    block = BlockSpec(
        norm=NormSpec(eps=config.number("layer_norm_epsilon", default=1e-5)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        activation=read_activation(config, "mlp_hidden_act", default="relu2"),
    )
    return describe(config, sizes, layers=layers, block=block, names=_NEMOTRON_NAMES)


_NEMOTRON_NAMES = TensorNames(
    renamed=(
        ("model.embed_tokens", "backbone.embeddings"),
        ("model.norm", "backbone.norm_f"),
        ("model.layers", "backbone.layers"),
        ("input_layernorm", "norm"),
        ("post_attention_layernorm", "norm"),
        (".self_attn.", ".mixer."),
        (".mlp.", ".mixer."),
    ),
    fused=parts_of_mixer("mamba2", "mixer"),
    ignored_prefixes=("mtp.",),
)


def _nemotron_experts(config: ConfigFile) -> ExpertsSpec:
    """Describe experts without a gate, chosen as DeepSeek's."""
    if latent_size := config.optional_integer("moe_latent_size") or 0:
        config.expect("mlp_bias", False, otherwise="projections around experts have biases")
    config.assume(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688)
    experts = read_grouped_experts(config, score="sigmoid")
    return replace(
        experts,
        is_gated=False,
        latent_size=latent_size,
        correction_shape=(experts.num_experts,),
        shared_size=config.integer("moe_shared_expert_intermediate_size", default=7688),
    )


def jamba(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    every = config.integer("attn_layer_period", default=8)
    first = config.integer("attn_layer_offset", default=4, minimum=0)
    inner = config.integer("mamba_expand", default=2) * sizes.hidden_size
    state = StateSpec(
        kind="mamba",
        taps=config.integer("mamba_d_conv", default=4, minimum=2),
        num_heads=1,
        value_dim=inner,
        key_dim=config.integer("mamba_d_state", default=16),
        conv_bias=config.boolean("mamba_conv_bias", default=True),
        bias=config.boolean("mamba_proj_bias", default=False),
        dt_rank=read_dt_rank(config, "mamba_dt_rank", sizes.hidden_size),
        dt_norm="weighted",
    )
    config.expect("hidden_act", "silu", otherwise="the convolution of this family has another activation")
    config.expect("sliding_window", None, otherwise="the attention has a window")
    config.pass_over("num_logits_to_keep", *OF_TRAINING)
    config.assume(num_experts=16, num_experts_per_tok=2)
    experts = read_experts(config, "num_experts", renormalize=False)
    expert_every = config.integer("expert_layer_period", default=2)
    first_expert = config.integer("expert_layer_offset", default=1, minimum=0)
    width = config.integer("intermediate_size")
    layers = tuple(
        replace(layer, mlp="experts", experts=experts)
        if experts.num_experts > 1 and index % expert_every == first_expert
        else layer
        for index, layer in enumerate(describe_layers(sizes, intermediate_size=width, rope=None))
    )
    layers = with_states(
        layers, {index: state for index in range(sizes.num_layers) if index % every != first}
    )
    names = TensorNames(
        renamed=(
            ("model.norm", "model.final_layernorm"),
            ("post_attention_layernorm", "pre_ff_layernorm"),
            (".mixer.", ".mamba."),
            (".mlp.gate.", ".feed_forward.router."),
            (".mlp.", ".feed_forward."),
        ),
        fused=parts_of_mixer(state.kind, "mamba"),
    )
    return describe(config, sizes, layers=layers, block=rms_block(config), names=names)
