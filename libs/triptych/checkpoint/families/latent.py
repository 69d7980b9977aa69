"""Families with latent attention: DeepSeek V2 and V3 (Kimi K2 is V3 with other numbers), DeepSeek V3.2 and GLM 5, which
choose keys, GLM 4.7 Flash, MiniCPM 3, Youtu.
"""

from __future__ import annotations

import math
from dataclasses import replace

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    ExpertsSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    ModelArchitecture,
    RopeParameters,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.keys import (
    STACKED_EXPERTS,
    WITH_IMAGES,
    Sizes,
    describe,
    describe_layers,
    read_dense_layers,
    read_grouped_experts,
    read_query_scaling,
    read_rope,
    read_sizes,
    with_dense_layers,
)
from triptych.checkpoint.families.llama import mistral, rms_block
from triptych.checkpoint.tensor_names import TensorNames

_LIKE_OURS = TensorNames()
_INDEXER = tuple(
    f".self_attn.indexer.{name}"
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)
"""Endings of the names of tensors that choose keys, which are not loaded where nothing is chosen."""


def deepseek_v2(config: ConfigFile) -> ModelArchitecture:
    config.assume(norm_topk_prob=False, num_experts_per_tok=6, n_routed_experts=64, n_shared_experts=2)
    sizes, latent = _read_sizes(config, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64)
    rope = read_rope(config, sizes, is_interleaved=True)
    config.expect(
        "norm_topk_prob", False, otherwise="the weights of a token's experts are divided by their sum"
    )
    config.expect("scoring_func", "softmax", otherwise="the router scores in another way")
    experts = read_grouped_experts(config, group_experts=1)
    if config.text("topk_method", default="greedy") == "greedy":
        experts = replace(experts, num_groups=1, top_groups=1)
    else:
        config.expect("topk_method", "group_limited_greedy", otherwise="the router chooses in another way")
    layers = _describe_layers(config, sizes, latent, rope, experts=experts)
    num_dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    block = replace(_block(config, latent, rope), mlp_bias=config.boolean("mlp_bias", default=False))
    return describe(config, sizes, layers=layers, block=block, names=_names(config, sizes))


def deepseek_v3(config: ConfigFile) -> ModelArchitecture:
    config.expect("topk_method", "noaux_tc", otherwise="the router chooses in another way")
    config.expect("scoring_func", "sigmoid", otherwise="the router scores in another way")
    sizes, latent = _read_sizes(config, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64)
    rope = _read_v3_rope(config, sizes)
    experts = read_grouped_experts(config, score="sigmoid")
    experts = replace(experts, correction_shape=(experts.num_experts,))
    layers = _describe_layers(config, sizes, latent, rope, experts=experts)
    num_dense = config.integer("first_k_dense_replace", default=3, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    block = _block(config, latent, rope)
    return describe(config, sizes, layers=layers, block=block, names=_names(config, sizes))


def glm4_moe_lite(config: ConfigFile) -> ModelArchitecture:
    """Read GLM 4.7 Flash, of which a list says what layers have a mixture."""
    config.assume(rms_norm_eps=1e-5, first_k_dense_replace=_count_dense(config, default=1))
    return deepseek_v3(config)


def deepseek_v32(config: ConfigFile) -> ModelArchitecture:
    config.assume(n_group=8, topk_group=4, index_n_heads=64)
    return _with_chosen_keys(config, frozenset(), is_interleaved=False)


def glm_moe_dsa(config: ConfigFile) -> ModelArchitecture:
    """Read GLM 5, of which some layers attend to the keys that an earlier one has chosen."""
    config.assume(rms_norm_eps=1e-5, index_n_heads=32)
    return _with_chosen_keys(config, _find_shared(config), is_interleaved=True)


def _find_shared(config: ConfigFile) -> frozenset[int]:
    """Return the layers without an indexer: by a list, a pattern such as FSSF, or a rhythm; in this order."""
    num_layers, kinds = config.integer("num_hidden_layers"), ("full", "shared")
    pattern = config.values.get("index_topk_pattern")
    if config.has("indexer_types"):
        types = config.words("indexer_types", length=num_layers, among=kinds)
    elif isinstance(pattern, str):
        config.pass_over("index_topk_pattern")
        if len(pattern) != num_layers or set(pattern) - {"F", "S"}:
            config.fail("index_topk_pattern", pattern, f"must be F or S for each of {num_layers} layers")
        types = tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
    elif config.has("index_topk_pattern"):
        types = config.words("index_topk_pattern", length=num_layers, among=kinds)
    else:
        frequency = max(config.integer("index_topk_freq", default=1, minimum=0), 1)
        offset = config.integer("index_skip_topk_offset", default=2, minimum=0)
        types = tuple(
            "shared" if max(index - offset + 1, 0) % frequency else "full" for index in range(num_layers)
        )
    config.pass_over("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    if types[0] == "shared":
        config.fail("indexer_types", types[0], "must be full for layer 0: no layer before it chooses keys")
    return frozenset(index for index, kind in enumerate(types) if kind == "shared")


def _with_chosen_keys(
    config: ConfigFile, shared: frozenset[int], *, is_interleaved: bool
) -> ModelArchitecture:
    """Read a model of which each token attends to the `index_topk` keys that an indexer prefers.

    Args:
        shared: Layers that take the choice of an earlier one.
        is_interleaved: What `indexer_rope_interleave` is by default.
    """
    config.assume(
        routed_scaling_factor=2.5,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=_count_dense(config, default=3),
    )
    num_layers = config.integer("num_hidden_layers")
    if config.has("layer_types"):
        config.words("layer_types", length=num_layers, among=("indexed_attention",))
    config.pass_over("layer_types", "mlp_bias")
    indexer = IndexerSpec(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim", default=128),
        is_interleaved=config.boolean("indexer_rope_interleave", default=is_interleaved),
    )
    num_keys = config.integer("index_topk", default=2048)
    architecture = deepseek_v3(config)
    latent = architecture.latent
    assert latent is not None, "that of DeepSeek V3 is"
    if not latent.q_rank:
        config.fail("q_lora_rank", None, "must be a number: the indexer's queries are made of that vector")
    if indexer.head_dim < latent.rope_dim:
        config.fail(
            "index_head_dim", indexer.head_dim, f"must be at least qk_rope_head_dim {latent.rope_dim}"
        )
    names = replace(architecture.names, ignored=_INDEXER)
    layers = tuple(
        replace(
            layer,
            latent=replace(
                latent, num_chosen_keys=num_keys, indexer=replace(indexer, is_shared=index in shared)
            ),
        )
        for index, layer in enumerate(architecture.layers)
    )
    return replace(architecture, layers=layers, names=names)


def _count_dense(config: ConfigFile, *, default: int) -> int:
    """Return the number of the first layers, those with one MLP, where a list says so of each layer."""
    num_layers = config.integer("num_hidden_layers")
    dense = read_dense_layers(config, num_layers, first=default)
    if dense != set(range(len(dense))):
        kinds = config.values["mlp_layer_types"]
        config.fail("mlp_layer_types", kinds, "must have its dense layers before the others")
    return len(dense)


def minicpm3(config: ConfigFile) -> ModelArchitecture:
    sizes, latent = _read_sizes(config, kv_rank=256, q_rank=768, nope_dim=64, rope_dim=32)
    rope = read_rope(config, sizes)
    config.assume(v_head_dim=sizes.hidden_size // sizes.num_heads)
    config.pass_over("rope_interleave")
    # null says that there is no such factor
    depth = 1.4 if "scale_depth" not in config.values else math.sqrt(sizes.num_layers)
    base = 256 if "dim_model_base" not in config.values else sizes.hidden_size
    ends = EndsSpec(
        embedding_multiplier=config.number("scale_emb", default=12.0),
        logits_multiplier=config.positive("dim_model_base", default=base) / sizes.hidden_size,
    )
    block = replace(
        _block(config, latent, rope, eps=1e-5),
        residual_multiplier=config.number("scale_depth", default=depth) / math.sqrt(sizes.num_layers),
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
    layers = _describe_layers(config, sizes, latent, rope)
    return describe(config, sizes, layers=layers, block=block, ends=ends, is_tied=True)


def youtu(config: ConfigFile) -> ModelArchitecture:
    sizes, latent = _read_sizes(config, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64)
    rope = _read_v3_rope(config, sizes)
    config.pass_over("embedding_initializer_range", "mlp_bias")
    layers = _describe_layers(config, sizes, latent, rope)
    return describe(config, sizes, layers=layers, block=_block(config, latent, rope), is_tied=True)


def mistral4(config: ConfigFile, names: TensorNames = _LIKE_OURS) -> ModelArchitecture:
    """Read Mistral Small 4: DeepSeek V3 with softmax in its router, and queries scaled by position."""
    config.assume(n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=4)
    sizes, latent = _read_sizes(config, kv_rank=256, q_rank=1024, nope_dim=64, rope_dim=64)
    head_dim = latent.nope_dim + latent.rope_dim
    # the file counts the rotated part among all elements of a head
    rope = read_rope(
        config,
        replace(sizes, head_dim=head_dim),
        partial=latent.rope_dim / head_dim,
        is_interleaved=config.boolean("rope_interleave", default=True),
    )
    if (rope.rotary_dim or head_dim) != latent.rope_dim:
        config.fail(
            "qk_rope_head_dim", latent.rope_dim, f"must be the {rope.rotary_dim} elements that are rotated"
        )
    rope = replace(rope, rotary_dim=0)
    experts = read_grouped_experts(config)
    layers = _describe_layers(config, sizes, latent, rope, experts=experts)
    num_dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    layers = with_dense_layers(layers, config.integer("intermediate_size"), range(num_dense))
    block = replace(_block(config, latent, rope), query_scaling=read_query_scaling(config, sizes))
    return describe(config, sizes, layers=layers, block=block, names=replace(names, fused=STACKED_EXPERTS))


def mistral_with_images(config: ConfigFile) -> ModelArchitecture:
    """Read the decoder of a composite checkpoint; its tower for images is left out."""
    config.pass_over(
        "vision_config",
        "image_token_index",
        "image_token_id",
        "projector_hidden_act",
        "spatial_merge_size",
        "multimodal_projector_bias",
        "vision_feature_layer",
    )
    text = config.text_section()
    text.pass_over("architectures")
    tied = config.boolean("tie_word_embeddings", default=False)
    read = mistral4 if text.values.get("model_type") == "mistral4" else mistral
    found = read(text, names=WITH_IMAGES)
    return replace(found, tie_word_embeddings=found.tie_word_embeddings or tied)


def _read_sizes(
    config: ConfigFile, *, kv_rank: int, q_rank: int, nope_dim: int, rope_dim: int
) -> tuple[Sizes, LatentSpec]:
    """Read the sizes under DeepSeek's keys, of which the family's defaults are given.

    Returns:
        Sizes with `head_dim` that part of a head which is rotated, and those of the latents.

    Raises:
        FeatureDisabled: The checkpoint has what latent attention is not computed with.
    """
    if "q_lora_rank" in config.values and not config.has("q_lora_rank"):
        q_rank = 0
        config.pass_over("q_lora_rank")
    latent = LatentSpec(
        kv_rank=config.integer("kv_lora_rank", default=kv_rank),
        q_rank=config.integer("q_lora_rank", default=q_rank, minimum=0) if q_rank else 0,
        nope_dim=config.integer("qk_nope_head_dim", default=nope_dim),
        rope_dim=config.integer("qk_rope_head_dim", default=rope_dim),
    )
    if latent.rope_dim % 2:
        config.fail("qk_rope_head_dim", latent.rope_dim, "must be even: pairs are rotated")
    config.expect("attention_bias", False, otherwise="the projections of the attention have biases")
    config.pass_over("qk_head_dim", "head_dim")  # sums of the others
    sizes = replace(read_sizes(config, default_head_dim=latent.rope_dim), head_dim=latent.rope_dim)
    if sizes.num_kv_heads != sizes.num_heads:
        config.fail(
            "num_key_value_heads",
            sizes.num_kv_heads,
            f"must be num_attention_heads {sizes.num_heads}: the latent is projected to a key for each head",
        )
    return sizes, latent


def _read_v3_rope(config: ConfigFile, sizes: Sizes) -> RopeParameters:
    return read_rope(config, sizes, is_interleaved=config.boolean("rope_interleave", default=True))


def _describe_layers(
    config: ConfigFile,
    sizes: Sizes,
    latent: LatentSpec,
    rope: RopeParameters,
    *,
    experts: ExpertsSpec | None = None,
) -> tuple[LayerSpec, ...]:
    width = config.integer("intermediate_size" if experts is None else "moe_intermediate_size")
    layers = describe_layers(sizes, intermediate_size=width, rope=rope, experts=experts)
    head_dim, value_dim = latent.nope_dim + latent.rope_dim, config.integer("v_head_dim", default=128)
    return tuple(
        replace(layer, num_kv_heads=1, head_dim=head_dim, value_dim=value_dim, latent=latent)
        for layer in layers
    )


def _names(config: ConfigFile, sizes: Sizes) -> TensorNames:
    """Return the names, without the layers behind the last one, which predict further tokens."""
    config.expect("moe_layer_freq", 1, otherwise="only some of the later layers have experts")
    # of training, and of how the first checkpoints were divided among devices
    config.pass_over("aux_loss_alpha", "seq_aux", "ep_size")
    key = "num_mtp_layers" if config.has("num_mtp_layers") else "num_nextn_predict_layers"
    num_further = config.integer(key, default=0, minimum=0)
    return TensorNames(
        ignored_prefixes=tuple(f"model.layers.{sizes.num_layers + index}." for index in range(num_further))
    )


def _block(config: ConfigFile, latent: LatentSpec, rope: RopeParameters, *, eps: float = 1e-6) -> BlockSpec:
    """Return the block, with the factor of the scores, to which yarn's `mscale_all_dim` adds."""
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    return replace(rms_block(config, eps=eps), attention_scale=scale)
