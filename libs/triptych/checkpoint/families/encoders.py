"""Families of encoders: BERT, RoBERTa and its kin, DistilBERT, ModernBERT, Nomic, GTE, Jina v3."""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EncoderHead,
    EncoderSpec,
    EndsSpec,
    ModelArchitecture,
    NormSpec,
    RopeParameters,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    SLIDING,
    Sizes,
    describe,
    describe_layers,
    read_activation,
    read_layer_types,
    read_rope,
    read_sizes,
)
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.labels import read_labels
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HALVES = ("mlp.gate_proj", "mlp.up_proj")
_IGNORED = ("position_ids", "token_type_ids")
"""Endings of buffers that older files hold."""
_EMBEDDINGS = (
    ("model.embed_tokens", "embeddings.word_embeddings"),
    ("model.embed_positions", "embeddings.position_embeddings"),
    ("model.embed_token_types", "embeddings.token_type_embeddings"),
    ("model.embed_norm", "embeddings.LayerNorm"),
)
_BERT = (
    ("model.layers.", "encoder.layer."),
    *_EMBEDDINGS,
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
    ("post_feedforward_layernorm", "output.LayerNorm"),
)


def bert(config: ConfigFile) -> ModelArchitecture:
    sizes, head = read_sizes(config), _head(config)
    return _bert(
        config,
        sizes,
        EndsSpec(num_learned_positions=sizes.max_positions, has_embedding_norm=True),
        EncoderSpec(config.integer("type_vocab_size", default=2, minimum=0), head=head),
        _names(("bert.",), (*_BERT, ("head.dense", "pooler.dense")), head),
    )


def roberta(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    # the padding token has a row of its own, and so have the ids before it
    offset = config.integer("pad_token_id", default=1, minimum=0) + 1
    if sizes.max_positions <= offset:
        config.fail("max_position_embeddings", sizes.max_positions, f"leaves none after the first {offset}")
    ends = EndsSpec(
        num_learned_positions=sizes.max_positions, learned_position_offset=offset, has_embedding_norm=True
    )
    head = _head(config)
    heads = (("classifier", "classifier.out_proj"), ("head.dense", "classifier.dense"))
    return _bert(
        config,
        replace(sizes, max_positions=sizes.max_positions - offset),
        ends,
        EncoderSpec(config.integer("type_vocab_size", default=1), head=head),
        _names(("roberta.",), (*_BERT, *heads), head),
    )


def mpnet(config: ConfigFile) -> ModelArchitecture:
    sizes, offset = read_sizes(config), 2  # the rows of padding and of the id before it
    ends = EndsSpec(
        num_learned_positions=sizes.max_positions, learned_position_offset=offset, has_embedding_norm=True
    )
    head = _head(config)
    renamed = (
        ("model.layers.", "encoder.layer."),
        ("model.relative_bias", "encoder.relative_attention_bias"),
        *_EMBEDDINGS,
        ("self_attn.q_proj", "attention.attn.q"),
        ("self_attn.k_proj", "attention.attn.k"),
        ("self_attn.v_proj", "attention.attn.v"),
        ("self_attn.o_proj", "attention.attn.o"),
        ("post_attention_layernorm", "attention.LayerNorm"),
        ("mlp.up_proj", "intermediate.dense"),
        ("mlp.down_proj", "output.dense"),
        ("post_feedforward_layernorm", "output.LayerNorm"),
        ("classifier", "classifier.out_proj"),
        ("head.dense", "classifier.dense"),
    )
    return _bert(
        config,
        replace(sizes, max_positions=sizes.max_positions - offset),
        ends,
        EncoderSpec(
            num_distance_buckets=config.integer("relative_attention_num_buckets", default=32), head=head
        ),
        _names(("mpnet.",), renamed, head),
    )


def jina(config: ConfigFile) -> ModelArchitecture:
    """Read an XLM-R with rotary embeddings in place of learned positions."""
    sizes, head = read_sizes(config), _head(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=read_rope(config, sizes, theta=20000.0),
        mlp="plain",
    )
    renamed = (
        ("model.layers.", "encoder.layers."),
        *(pair for pair in _EMBEDDINGS if pair[0] != "model.embed_norm"),
        ("model.embed_norm", "emb_ln"),
        ("self_attn.o_proj", "mixer.out_proj"),
        ("post_attention_layernorm", "norm1"),
        ("post_feedforward_layernorm", "norm2"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("classifier", "classifier.out_proj"),
        ("head.dense", "classifier.dense"),
    )
    described = describe(
        config,
        sizes,
        layers=layers,
        block=_block(config.number("layer_norm_eps", default=1e-5), read_activation(config, default="gelu")),
        ends=EndsSpec(has_embedding_norm=True),
        names=replace(_names(("roberta.",), renamed, head), fused=(FusedTensor("mixer.Wqkv", _QKV),)),
    )
    return _encoder(described, EncoderSpec(config.integer("type_vocab_size", default=1), head=head))


def _bert(
    config: ConfigFile, sizes: Sizes, ends: EndsSpec, encoder: EncoderSpec, names: TensorNames
) -> ModelArchitecture:
    config.expect("position_embedding_type", "absolute", otherwise="scores depend on distances")
    config.expect("is_decoder", False, otherwise="it is a decoder")
    config.expect("embedding_size", sizes.hidden_size, otherwise="embeddings are projected")
    layers = describe_layers(
        sizes, intermediate_size=config.integer("intermediate_size"), rope=None, mlp="plain"
    )
    block = _block(config.number("layer_norm_eps", default=1e-12), read_activation(config, default="gelu"))
    described = describe(config, sizes, layers=layers, block=block, ends=ends, names=names)
    return _encoder(described, encoder)


def _encoder(described: ModelArchitecture, spec: EncoderSpec) -> ModelArchitecture:
    """Return a description of an encoder; one for masked words ties a head to its embedding, which is not used here."""
    head, num_labels = ("none", 0) if spec.head is None else ("score", spec.head.num_labels)
    return replace(described, tie_word_embeddings=False, encoder=spec, head=head, num_labels=num_labels)


def _block(eps: float, activation: str, *, bias: bool = True) -> BlockSpec:
    return BlockSpec(
        norm=NormSpec("layer", eps=eps, bias=True),
        norms="sum",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation=activation,
    )


def distilbert(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config, hidden="dim", layers="n_layers", heads="n_heads")
    layers = describe_layers(sizes, intermediate_size=config.integer("hidden_dim"), rope=None, mlp="plain")
    config.pass_over("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    head = _head(config, activation="relu")
    renamed = (
        ("model.layers.", "transformer.layer."),
        *_EMBEDDINGS,
        ("self_attn.q_proj", "attention.q_lin"),
        ("self_attn.k_proj", "attention.k_lin"),
        ("self_attn.v_proj", "attention.v_lin"),
        ("self_attn.o_proj", "attention.out_lin"),
        ("post_attention_layernorm", "sa_layer_norm"),
        ("mlp.up_proj", "ffn.lin1"),
        ("mlp.down_proj", "ffn.lin2"),
        ("post_feedforward_layernorm", "output_layer_norm"),
        ("head.dense", "pre_classifier"),
    )
    described = describe(
        config,
        sizes,
        layers=layers,
        block=_block(1e-12, read_activation(config, "activation", default="gelu")),
        ends=EndsSpec(num_learned_positions=sizes.max_positions, has_embedding_norm=True),
        names=_names(("distilbert.",), renamed, head),
    )
    return _encoder(described, EncoderSpec(head=head))


def modernbert(config: ConfigFile) -> ModelArchitecture:
    sizes = read_sizes(config)
    every = config.integer("global_attn_every_n_layers", default=3)
    layer_types = read_layer_types(
        config, sizes.num_layers, default=lambda index: SLIDING if index % every else "full_attention"
    )
    thetas = {
        kind: config.positive(key, default=default, maximum=1e15)
        for kind, key, default in (
            ("full_attention", "global_rope_theta", 160000.0),
            (SLIDING, "local_rope_theta", 10000.0),
        )
    }
    ropes = {
        kind: read_rope(config, sizes, layer_type=kind, theta=thetas[kind])
        for kind in dict.fromkeys(layer_types)
    }
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=lambda index, kind: ropes[kind],
        layer_types=layer_types,
        # half of it on each side, and the token's own
        window=config.integer("local_attention", default=128) // 2 + 1,
    )
    config.pass_over(
        "classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "sparse_prediction",
        "sparse_pred_ignore_index", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
        "mlp_dropout", "layer_norm_eps", "position_embedding_type", "sliding_window", "num_key_value_heads",
    )  # fmt: skip
    head = _modernbert_head(config)
    renamed = (
        ("model.layers.", "layers."),
        ("model.embed_tokens", "embeddings.tok_embeddings"),
        ("model.embed_norm", "embeddings.norm"),
        ("model.norm", "final_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn.o_proj", "attn.Wo"),
        ("mlp.down_proj", "mlp.Wo"),
    )
    names = replace(
        _names(("model.",), renamed, head),
        fused=(FusedTensor("attn.Wqkv", _QKV), FusedTensor("mlp.Wi", _HALVES)),
    )
    ends = EndsSpec(has_embedding_norm=True)
    described = describe(
        config, sizes, layers=layers, block=_modernbert_block(config), ends=ends, names=names
    )
    encoder = EncoderSpec(has_first_norm=False, has_last_norm=True, head=head)
    return _encoder(described, encoder)


def _modernbert_block(config: ConfigFile) -> BlockSpec:
    norm = NormSpec(
        "layer", config.number("norm_eps", default=1e-5), bias=config.boolean("norm_bias", default=False)
    )
    has_bias = config.boolean("attention_bias", default=False)
    return BlockSpec(
        norm=norm,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        activation=read_activation(config, "hidden_activation", default="gelu"),
    )


def _modernbert_head(config: ConfigFile) -> EncoderHead | None:
    head = _head(config, activation="")
    if head is None:
        return None
    pooling = config.text("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        config.fail("classifier_pooling", pooling, "must be cls or mean")
    return replace(
        head,
        activation=read_activation(config, "classifier_activation", default="gelu"),
        dense_bias=config.boolean("classifier_bias", default=False),
        has_norm=True,
        pooling="first" if pooling == "cls" else pooling,
    )


def nomic(config: ConfigFile) -> ModelArchitecture:
    if config.has("n_embd"):
        _translate_nomic(config)
    renamed = (
        ("model.layers.", "encoder.layers."),
        *(pair for pair in _EMBEDDINGS if pair[0] != "model.embed_norm"),
        ("model.embed_norm", "emb_ln"),
        ("self_attn.o_proj", "attn.out_proj"),
        ("post_attention_layernorm", "norm1"),
        ("post_feedforward_layernorm", "norm2"),
        ("mlp.gate_proj", "mlp.fc12"),
        ("mlp.up_proj", "mlp.fc11"),
        ("mlp.down_proj", "mlp.fc2"),
        ("head.dense", "pooler.dense"),
    )
    return _rotary_bert(
        config, ("nomic_bert.",), renamed, (FusedTensor("attn.Wqkv", _QKV),), theta=1000.0, activation="silu"
    )


def _translate_nomic(config: ConfigFile) -> None:
    """Give the keys of the files that came with code of their own the names that transformers has."""
    for key, value, otherwise in (
        ("activation_function", "swiglu", "the MLP has another form"),
        ("prenorm", False, "norms stand before what they normalise"),
        ("use_rms_norm", False, "norms are of another kind"),
        ("qkv_proj_bias", False, "projections have biases"),
        ("mlp_fc1_bias", False, "projections have biases"),
        ("mlp_fc2_bias", False, "projections have biases"),
        ("rotary_emb_fraction", 1.0, "a part of each head is rotated"),
        ("rotary_emb_interleaved", False, "neighbours are rotated"),
        ("rotary_emb_scale_base", None, "rotations are scaled"),
        ("rotary_scaling_factor", None, "rotations are scaled by the text's length"),
        ("parallel_block", False, "attention and MLP read the same input"),
        ("causal", False, "tokens see no later ones"),
        ("num_experts", 0, "its MLPs are mixtures of experts"),
    ):
        config.expect(key, value, otherwise=otherwise)
    config.pass_over(
        "n_embd", "n_head", "n_inner", "n_layer", "n_positions", "layer_norm_epsilon", "rotary_emb_base",
        "dense_seq_output", "expert_choice_router", "ffn_div", "fused_bias_fc", "fused_dropout_add_ln",
        "last_layer_subset", "max_trained_positions", "moe_every_n_layers", "moe_impl", "moe_normalize_expert_weights",
        "moe_resid_pdrop", "moe_top_k", "num_shared_experts", "pad_vocab_size_multiple", "parallel_block_tied_norm",
        "reorder_and_upcast_attn", "router_aux_loss_coef", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
        "use_xentropy",
    )  # fmt: skip
    today = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    }
    config.assume(
        **{name: config.values[before] for name, before in today.items() if config.has(before)},
    )


def gte(config: ConfigFile) -> ModelArchitecture:
    # of the files that came with code of their own
    config.pass_over("pack_qkv", "use_memory_efficient_attention", "unpad_inputs")
    config.expect("layer_norm_type", "layer_norm", otherwise="norms are of another kind")
    config.expect("position_embedding_type", "rope", otherwise="positions are learned")
    config.expect("logn_attention_scale", False, otherwise="scores are scaled by the text's length")
    config.expect("logn_attention_clip1", False, otherwise="scores are scaled by the text's length")
    renamed = (
        ("model.layers.", "encoder.layer."),
        *_EMBEDDINGS,
        ("self_attn.o_proj", "attention.o_proj"),
        ("post_attention_layernorm", "attn_ln"),
        ("post_feedforward_layernorm", "mlp_ln"),
        ("head.dense", "pooler.dense"),
    )
    fused = (
        FusedTensor("attention.qkv_proj", _QKV),
        FusedTensor("mlp.up_gate_proj", _HALVES[::-1]),
    )
    described = _rotary_bert(config, ("new.", "gte."), renamed, fused, theta=160000.0, activation="gelu")
    block = replace(described.block, qkv_bias=True, out_bias=True, down_bias=True)
    return replace(described, block=block)


def _rotary_bert(
    config: ConfigFile,
    prefixes: tuple[str, ...],
    renamed: tuple[tuple[str, str], ...],
    fused: tuple[FusedTensor, ...],
    *,
    theta: float,
    activation: str,
) -> ModelArchitecture:
    """Read a BERT with rotary embeddings and gated MLPs."""
    sizes, head = read_sizes(config), _head(config)
    layers = describe_layers(
        sizes,
        intermediate_size=config.integer("intermediate_size"),
        rope=_read_ntk(config, sizes, theta) or read_rope(config, sizes, theta=theta),
    )
    block = _block(
        config.number("layer_norm_eps", default=1e-12),
        read_activation(config, default=activation),
        bias=False,
    )
    described = describe(
        config,
        sizes,
        layers=layers,
        block=block,
        ends=EndsSpec(has_embedding_norm=True),
        names=replace(_names(prefixes, renamed, head), fused=fused),
    )
    encoder = EncoderSpec(config.integer("type_vocab_size", default=2, minimum=0), head=head)
    return _encoder(described, encoder)


def _read_ntk(config: ConfigFile, sizes: Sizes, theta: float) -> RopeParameters | None:
    """Read the scaling that GTE's files with code of their own call ntk, for texts of any length; None for others.

    With a factor f, frequency i of d / 2 is divided by `f ** (2 * (i + 1) / d)`: the base is multiplied by f, and all
    frequencies are divided by `f ** (2 / d)`.
    """
    scaling = config.section("rope_scaling")
    if scaling is None or scaling.values.get("type") != "ntk":
        return None
    scaling.pass_over("type")
    scaling.expect("mixed_b", None, otherwise="frequencies are scaled by a power of their place")
    factor = scaling.positive("factor")
    return RopeParameters(
        theta=config.positive("rope_theta", default=theta, maximum=1e15) * factor,
        kind="linear",
        factor=factor ** (2 / sizes.head_dim),
        original_max_position_embeddings=sizes.max_positions,
    )


def _head(config: ConfigFile, *, activation: str = "tanh") -> EncoderHead | None:
    """Return the head of `…ForSequenceClassification`; None for other architectures."""
    config.pass_over("id2label", "label2id", "num_labels", "pad_token_id")
    if not architecture_name(config).endswith("ForSequenceClassification"):
        return None
    return EncoderHead(len(read_labels(ConfigFile(config.path, config.values))), activation)


def _names(
    prefixes: tuple[str, ...], renamed: tuple[tuple[str, str], ...], head: EncoderHead | None
) -> TensorNames:
    """Return the names of an encoder, in files of a bare one and of one with a head.

    Args:
        prefixes: Of the encoder's tensors in files with a head.
    """
    heads = ("cls.", "lm_head.", "qa_outputs.", "vocab_", "head.", "decoder.", "pooler.")
    others = () if head else ("classifier.", "pre_classifier.")
    return TensorNames(
        renamed=renamed,
        older=tuple((prefix, "") for prefix in prefixes),
        ignored=_IGNORED,
        ignored_prefixes=(*heads, *others),
    )
