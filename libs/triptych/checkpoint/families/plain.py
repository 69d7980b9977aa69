"""Families of LayerNorm and MLPs without a gate: GPT-2, GPT-BigCode, OPT, BLOOM, MPT, StarCoder 2, Nemotron."""

from __future__ import annotations

import math
from dataclasses import replace

from triptych.checkpoint.architecture import BlockSpec, EndsSpec, ModelArchitecture, NormSpec
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    FULL,
    SLIDING,
    describe,
    describe_layers,
    read_activation,
    read_rope,
    read_sizes,
    read_window,
)
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _block(eps: float, *, bias: bool, activation: str, norm_bias: bool = True) -> BlockSpec:
    return BlockSpec(
        norm=NormSpec("layer", eps=eps, bias=norm_bias),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation=activation,
    )


def bloom(config: ConfigFile) -> ModelArchitecture:
    hidden = "hidden_size" if config.has("hidden_size") else "n_embed"
    sizes = read_sizes(
        config,
        hidden=hidden,
        layers="n_layer" if config.has("n_layer") else "num_hidden_layers",
        heads="n_head" if config.has("n_head") else "num_attention_heads",
        positions="seq_length",
        default_positions=2048,
    )
    config.pass_over("n_embed", "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion")
    config.pass_over(
        "bias_dropout_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id"
    )
    config.expect(
        "apply_residual_connection_post_layernorm", False, otherwise="the residual is taken after the norm"
    )
    layers = describe_layers(sizes, intermediate_size=4 * sizes.hidden_size, rope=None, mlp="plain")
    eps = config.number("layer_norm_epsilon", default=1e-5)
    block = replace(
        _block(eps, bias=True, activation="gelu_pytorch_tanh"), alibi_slopes=alibi_slopes(sizes.num_heads)
    )
    names = TensorNames(
        renamed=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.word_embeddings"),
            ("model.embed_norm", "transformer.word_embeddings_layernorm"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        fused=(FusedTensor("self_attention.query_key_value", _QKV, interleaved="kv_heads"),),
        older=tuple((part, f"transformer.{part}") for part in ("h.", "word_embeddings", "ln_f.")),
    )
    ends = EndsSpec(has_embedding_norm=True)
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names, is_tied=True)


def alibi_slopes(num_heads: int, *, bias_max: int = 8) -> tuple[float, ...]:
    """Return the slopes of heads: powers of 2^(-bias_max / heads), those of a further power of two in between.

    Source: ALiBi, arXiv:2108.12409.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (index + 1) / power) for index in range(power)]
    between = [2 ** (-bias_max * (index + 1) / (2 * power)) for index in range(0, 2 * power, 2)]
    return tuple((slopes + between)[:num_heads])


def gpt2(config: ConfigFile) -> ModelArchitecture:
    return _gpt2(config, kv_heads=0, is_transposed=True, interleaved="no")


def gpt_bigcode(config: ConfigFile) -> ModelArchitecture:
    is_multi_query = config.boolean("multi_query", default=True)
    config.pass_over("num_key_value_heads")
    config.pass_over(
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "runner_max_sequence_length"
    )
    config.pass_over("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    return _gpt2(
        config,
        kv_heads=int(is_multi_query),
        is_transposed=False,
        interleaved="no" if is_multi_query else "kv_heads",
    )


def _gpt2(config: ConfigFile, *, kv_heads: int, is_transposed: bool, interleaved: str) -> ModelArchitecture:
    """Read GPT-2 or what kept its names.

    Args:
        kv_heads: Number of key heads; 0: as many as heads.
    """
    sizes = read_sizes(config, hidden="n_embd", layers="n_layer", heads="n_head", positions="n_positions")
    sizes = replace(sizes, num_kv_heads=kv_heads or sizes.num_heads)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("n_inner", default=4 * sizes.hidden_size),
        rope=None,
        mlp="plain",
    )
    config.pass_over("n_ctx", "reorder_and_upcast_attn")
    config.pass_over("apply_query_key_layer_scaling", "normalize_attention_scores")
    config.expect(
        "scale_attn_weights", True, otherwise="scores are not divided by the root of the head's size"
    )
    config.expect(
        "scale_attn_by_inverse_layer_idx", False, otherwise="scores are divided by the layer's number"
    )
    activation = read_activation(
        config, "activation_function", default="gelu_new" if is_transposed else "gelu_pytorch_tanh"
    )
    block = _block(config.number("layer_norm_epsilon", default=1e-5), bias=True, activation=activation)
    modules = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = TensorNames(
        renamed=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.embed_positions", "transformer.wpe"),
            ("model.norm", "transformer.ln_f"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ),
        fused=(FusedTensor("attn.c_attn", _QKV, interleaved=interleaved),),
        transposed=modules if is_transposed else (),
        older=tuple((part, f"transformer.{part}") for part in ("h.", "wte.", "wpe.", "ln_f.")),
        ignored=("attn.bias", "attn.masked_bias"),
    )
    ends = EndsSpec(num_learned_positions=sizes.max_positions)
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names, is_tied=True)


def mpt(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, hidden="d_model", layers="n_layers", heads="n_heads", positions="max_seq_len")
    attention = config.section("attn_config") or ConfigFile(config.path, {})
    attention.pass_over("attn_type", "attn_impl", "kv_n_heads", "attn_uses_sequence_id")
    for key in ("qk_gn", "rope"):
        attention.expect(key, False, otherwise="queries and keys are changed in another way")
    attention.expect("attn_type", "multihead_attention", otherwise="heads share keys")
    attention.expect("alibi", True, otherwise="positions are learned")
    attention.expect("qk_ln", False, otherwise="queries and keys have norms")
    attention.expect("prefix_lm", False, otherwise="tokens of a prompt see later ones")
    config.expect("expansion_ratio", 4, otherwise="the MLP has another width")
    config.expect("no_bias", True, otherwise="projections have biases")
    config.expect("logit_scale", None, otherwise="logits have a factor")
    config.pass_over(
        "learned_pos_emb",
        "init_device",
        "init_config",
        "norm_type",
        "embedding_fraction",
        "verbose",
        "fc_type",
    )
    if "rms" in config.text("norm_type", default=""):
        config.expect("norm_type", "layernorm", otherwise="vectors are normalised in another way")
    layers = describe_layers(sizes, intermediate_size=4 * sizes.hidden_size, rope=None, mlp="plain")
    eps = config.number("layer_norm_epsilon", default=1e-5)
    bias_max = attention.integer("alibi_bias_max", default=8)
    block = replace(
        _block(eps, bias=False, activation="gelu", norm_bias=False),
        alibi_slopes=_mpt_slopes(sizes.num_heads, bias_max),
        clip_qkv=attention.number("clip_qkv", default=0.0),
        attention_scale=attention.positive("softmax_scale") if attention.has("softmax_scale") else 0.0,
    )
    names = TensorNames(
        renamed=(
            ("model.layers.", "transformer.blocks."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.norm_f"),
            ("input_layernorm", "norm_1"),
            ("post_attention_layernorm", "norm_2"),
            ("self_attn.o_proj", "attn.out_proj"),
            ("mlp.", "ffn."),
        ),
        fused=(FusedTensor("attn.Wqkv", _QKV),),
    )
    return describe(config, sizes, layers=layers, block=block, names=names, is_tied=True)


def _mpt_slopes(num_heads: int, bias_max: int) -> tuple[float, ...]:
    """Return slopes for a number of heads that is no power of two as MPT orders them."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (index + 1) / power) for index in range(power)]
    return tuple((slopes if power == num_heads else slopes[1::2] + slopes[::2])[:num_heads])


def nemotron(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, partial=config.number("rope_percent", default=0.5)),
        mlp="plain",
    )
    bias = config.boolean("attention_bias", default=False)
    block = BlockSpec(
        norm=NormSpec("layer", eps=config.number("norm_eps", default=1e-5), bias=True, offset=1.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        activation=read_activation(config, default="relu2"),
    )
    return describe(config, sizes, layers=layers, block=block)


def opt(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layers = describe_layers(sizes, intermediate_size=config.integer("ffn_dim"), rope=None, mlp="plain")
    config.expect("do_layer_norm_before", True, otherwise="norms follow what they normalise")
    config.expect("_remove_final_layer_norm", False, otherwise="the last norm is missing")
    config.expect("output_projection", True, otherwise="embeddings are projected")
    config.expect("layer_norm_elementwise_affine", True, otherwise="norms have no weights")
    config.expect("word_embed_proj_dim", sizes.hidden_size, otherwise="embeddings are projected")
    bias = config.boolean("enable_bias", default=True)
    activation = read_activation(config, "activation_function", default="relu")
    block = _block(1e-5, bias=bias, activation=activation)
    offset = 2  # the table's first rows are those of padding
    ends = EndsSpec(num_learned_positions=sizes.max_positions + offset, learned_position_offset=offset)
    names = TensorNames(
        renamed=(
            ("model.norm", "model.final_layer_norm"),
            ("model.", "model.decoder."),
            ("post_attention_layernorm", "final_layer_norm"),
            ("input_layernorm", "self_attn_layer_norm"),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("mlp.up_proj", "fc1"),
            ("mlp.down_proj", "fc2"),
        ),
        older=(("decoder.", "model.decoder."),),
    )
    return describe(config, sizes, layers=layers, block=block, ends=ends, names=names, is_tied=True)


def starcoder2(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    layer_types = (SLIDING if config.has("sliding_window") else FULL,) * sizes.num_layers
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes),
        layer_types=layer_types,
        window=read_window(config, layer_types),
        mlp="plain",
    )
    config.expect("mlp_type", "default", otherwise="the MLP has another form")
    config.expect("norm_type", "layer_norm", otherwise="vectors are normalised in another way")
    config.pass_over("activation_function", "layer_norm_epsilon", "scale_attn_weights")
    config.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    eps = config.number("norm_epsilon", default=1e-5)
    block = _block(
        eps,
        bias=config.boolean("use_bias", default=True),
        activation=read_activation(config, default="gelu_pytorch_tanh"),
    )
    names = TensorNames(renamed=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")))
    return describe(config, sizes, layers=layers, block=block, names=names, is_tied=True)
