"""Families in which attention and MLP read the same states: GPT-J and NeoX, Falcon, Phi, StableLM, Cohere."""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    ExpertsSpec,
    ModelArchitecture,
    NormSpec,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    describe,
    describe_layers,
    read_activation,
    read_dense_layers,
    read_experts,
    read_layer_types,
    read_rope,
    read_sizes,
    read_window,
    with_dense_layers,
)
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def cohere(config: ConfigFile) -> ModelArchitecture:
    """Read Command R, and Command R7B (Cohere 2), where only layers with a window have positions."""
    is_2 = architecture_name(config) == "Cohere2ForCausalLM"
    if is_2:
        config.assume(sliding_window=4096)
    sizes = read_sizes(config)
    every = config.integer("sliding_window_pattern", default=4)
    layer_types = read_layer_types(
        config,
        sizes.num_layers,
        default=lambda index: SLIDING if is_2 and (index + 1) % every else FULL,
    )
    rope = read_rope(config, sizes, theta=10000.0 if is_2 else 500000.0, is_interleaved=True)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: rope if kind == SLIDING or not is_2 else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
    )
    config.expect("use_qk_norm", False, otherwise="each head's queries and keys have a norm of their own")
    config.expect("position_embedding_type", "rope_gptj", otherwise="positions are embedded in another way")
    config.expect("use_parallel_block", True, otherwise="the MLP follows the attention")
    config.expect("use_gated_activation", True, otherwise="the MLP has no gate")
    config.pass_over(
        "use_embedding_sharing",
        "use_parallel_embedding",
        "layer_switch",
        "order_of_interleaved_layers",
    )
    config.expect("rotary_pct", 1, otherwise="a part of each head is rotated")
    bias = config.boolean("attention_bias", default=False)
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_eps", default=1e-5)),
        parallel="one_norm",
        qkv_bias=bias,
        out_bias=bias,
        activation=read_activation(config),
    )
    ends = EndsSpec(logits_multiplier=config.number("logit_scale", default=0.0625))
    return describe(config, sizes, layers=layers, block=block, ends=ends, is_tied=True)


def cohere_moe(config: ConfigFile) -> ModelArchitecture:
    """Read Cohere 2 with a mixture: attention beside experts, positions in layers with a window and in dense ones."""
    config.assume(sliding_window=4096, num_experts=8, num_experts_per_tok=2)
    sizes = read_sizes(config)
    num_dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    of_dense = config.integer("prefix_dense_sliding_window_pattern", default=1)
    every = config.integer("sliding_window_pattern", default=4)

    def kind_of(index: int) -> str:
        place, period = (index, of_dense) if index < num_dense else (index - num_dense, every)
        return SLIDING if (place + 1) % period else FULL

    layer_types = read_layer_types(config, sizes.num_layers, default=kind_of)
    dense = read_dense_layers(config, sizes.num_layers, first=num_dense)
    rope, width = read_rope(config, sizes, is_interleaved=True), config.integer("intermediate_size")
    layers = describe_layers(
        sizes,
        intermediate_size=width,
        rope=lambda index, kind: rope if kind == SLIDING or (index in dense and of_dense == 1) else None,
        layer_types=layer_types,
        window=read_window(config, layer_types),
        experts=_cohere_experts(config, width),
    )
    dense_width = config.integer("prefix_dense_intermediate_size", default=width)
    layers = with_dense_layers(layers, dense_width, dense)
    config.expect("use_qk_norm", False, otherwise="each head's queries and keys have a norm of their own")
    config.expect("use_parallel_block", True, otherwise="the MLP follows the attention")
    config.expect("use_gated_activation", True, otherwise="the MLP has no gate")
    config.expect("layer_norm_bias", False, otherwise="norms have biases")
    bias, has_rms = config.boolean("attention_bias", default=False), config.has("rms_norm_eps")
    config.pass_over("layer_norm_eps" if has_rms else "rms_norm_eps")
    norm = NormSpec(
        "rms" if has_rms else "layer",
        eps=config.number("rms_norm_eps" if has_rms else "layer_norm_eps", default=1e-5),
    )
    block = BlockSpec(
        norm=norm, parallel="one_norm", qkv_bias=bias, out_bias=bias, activation=read_activation(config)
    )
    ends = EndsSpec(logits_multiplier=config.number("logit_scale", default=0.0625))
    return describe(config, sizes, layers=layers, block=block, ends=ends, is_tied=True)


def _cohere_experts(config: ConfigFile, width: int) -> ExpertsSpec:
    """Describe experts chosen by their logits, with sigmoids as weights, or a softmax of those that were chosen."""
    score = config.text("expert_selection_fn", default="softmax")
    if score not in ("softmax", "sigmoid"):
        config.fail("expert_selection_fn", score, "must be softmax or sigmoid")
    is_divided = config.boolean("norm_topk_prob", default=True)
    num_shared = config.integer("num_shared_experts", default=0, minimum=0)
    if num_shared:
        config.expect(
            "shared_expert_combination_strategy", "sum", otherwise="shared experts and others are averaged"
        )
    config.pass_over("shared_expert_combination_strategy")
    return replace(
        read_experts(config, "num_experts", renormalize=score == "softmax" or is_divided),
        score=score,
        shared_size=width * num_shared,
    )


def falcon(config: ConfigFile) -> ModelArchitecture:
    is_new = config.boolean("new_decoder_architecture", default=False)
    is_multi_query = config.boolean("multi_query", default=True)
    sizes = read_sizes(config, kv_heads="num_kv_heads", default_positions=2048)
    if not is_new:
        config.pass_over("num_kv_heads")
        sizes = replace(sizes, num_kv_heads=1 if is_multi_query else sizes.num_heads)
    config.pass_over("ff_factor")
    config.expect(
        "apply_residual_connection_post_layernorm", False, otherwise="the residual is taken after the norm"
    )
    config.expect("alibi", False, otherwise="scores depend on distances rounded to bfloat16")
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("ffn_hidden_size", default=4 * sizes.hidden_size),
        rope=read_rope(config, sizes),
        mlp="plain",
    )
    is_parallel = is_new or config.boolean("parallel_attn", default=True)
    config.pass_over("parallel_attn")
    two_norms = is_new and config.integer("num_ln_in_parallel_attn", default=2) == 2
    config.pass_over("num_ln_in_parallel_attn")
    bias = config.boolean("bias", default=False)
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_epsilon", default=1e-5), bias=True),
        parallel="no" if not is_parallel else "two_norms" if two_norms else "one_norm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation=read_activation(config, "activation", default="gelu"),
    )
    norms = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")) if two_norms else ()
    names = TensorNames(
        renamed=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.word_embeddings"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            *norms,
        ),
        fused=(FusedTensor("self_attention.query_key_value", _QKV, interleaved="kv_heads"),),
    )
    return describe(config, sizes, layers=layers, block=block, names=names, is_tied=True)


def gptj(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, hidden="n_embd", layers="n_layer", heads="n_head", positions="n_positions")
    rotary_dim = config.integer("rotary_dim", default=64)
    if rotary_dim > sizes.head_dim or rotary_dim % 2:
        config.fail(
            "rotary_dim", rotary_dim, f"must be even and at most the size of a head, {sizes.head_dim}"
        )
    rope = replace(
        read_rope(config, sizes, is_interleaved=True),
        rotary_dim=0 if rotary_dim == sizes.head_dim else rotary_dim,
    )
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("n_inner", default=4 * sizes.hidden_size),
        rope=rope,
        mlp="plain",
    )
    config.pass_over("scale_attn_weights", "n_ctx", "rotary")
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_epsilon", default=1e-5), bias=True),
        parallel="one_norm",
        mlp_bias=True,
        activation=read_activation(config, "activation_function", default="gelu_new"),
    )
    names = TensorNames(
        renamed=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.ln_f"),
            ("input_layernorm", "ln_1"),
            ("self_attn.o_proj", "attn.out_proj"),
            ("self_attn.", "attn."),
            ("mlp.up_proj", "mlp.fc_in"),
            ("mlp.down_proj", "mlp.fc_out"),
        ),
        ignored=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
    )
    return describe(config, sizes, layers=layers, block=block, ends=EndsSpec(head_bias=True), names=names)


def gpt_neox(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    partial = config.number("rotary_pct", default=0.25)
    theta = config.number("rotary_emb_base", default=10000.0)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, partial=partial, theta=theta),
        mlp="plain",
    )
    bias = config.boolean("attention_bias", default=True)
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_eps", default=1e-5), bias=True),
        parallel="two_norms" if config.boolean("use_parallel_residual", default=True) else "no",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        activation=read_activation(config, default="gelu"),
    )
    names = TensorNames(
        renamed=(
            ("model.layers.", "gpt_neox.layers."),
            ("model.embed_tokens", "gpt_neox.embed_in"),
            ("model.norm", "gpt_neox.final_layer_norm"),
            ("lm_head", "embed_out"),
            ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        fused=(FusedTensor("attention.query_key_value", _QKV, interleaved="kv_heads"),),
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )
    return describe(config, sizes, layers=layers, block=block, names=names)


def phi(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, partial=0.5),
        mlp="plain",
    )
    config.expect("qk_layernorm", False, otherwise="queries and keys have norms")
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_eps", default=1e-5), bias=True),
        parallel="one_norm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=read_activation(config, default="gelu_new"),
    )
    names = TensorNames(
        renamed=(
            ("model.norm", "model.final_layernorm"),
            ("self_attn.o_proj", "self_attn.dense"),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
        )
    )
    return describe(config, sizes, layers=layers, block=block, ends=EndsSpec(head_bias=True), names=names)


def stablelm(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, partial=0.25),
    )
    config.pass_over("norm_eps", "rope_pct", "rotary_scaling_factor")  # of the model's own first code
    config.expect("qk_layernorm", False, otherwise="each head's queries and keys have a norm of their own")
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("layer_norm_eps", default=1e-5), bias=True),
        parallel="one_norm" if config.boolean("use_parallel_residual", default=False) else "no",
        qkv_bias=config.boolean("use_qkv_bias", default=False),
        activation=read_activation(config),
    )
    return describe(config, sizes, layers=layers, block=block)
