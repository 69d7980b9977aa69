"""Keys that many families share: sizes, layer types, windows, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from triptych.checkpoint.architecture import (
    BlockSpec,
    EndsSpec,
    ExpertsSpec,
    LayerSpec,
    ModelArchitecture,
    RopeParameters,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.registry import architecture_name
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_ATTENTION = {FULL: "full", SLIDING: "sliding", CHUNKED: "chunked"}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
"""Hugging Face's names -> those of `ops.ACTIVATIONS`."""

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")

WITH_IMAGES = TensorNames(
    renamed=(("model.", "model.language_model."),),
    older=(
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
    ignored_prefixes=("model.vision_tower.", "model.multi_modal_projector."),
)
"""Names of composite checkpoints, of which the part for text is served."""


def stacked_experts(
    module: str, *, suffixes: tuple[str, str] = ("", "_bias"), **layout: Any
) -> tuple[FusedTensor, ...]:
    """Return the two tensors of all experts of a layer, as the modules of transformers have them.

    Args:
        module: Their module in the checkpoint, as it follows the layer's prefix.
        suffixes, layout: As of `FusedTensor`.
    """
    parts_of = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return tuple(
        FusedTensor(
            f"{module}.{name}",
            tuple(f"mlp.experts.{part}" for part in parts),
            of_experts=True,
            suffixes=suffixes,
            **layout,
        )
        for name, parts in parts_of.items()
    )


STACKED_EXPERTS = stacked_experts("mlp.experts")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that most families have, whatever they call them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


def read_sizes(
    config: ConfigFile,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    kv_heads: str = "num_key_value_heads",
    positions: str = "max_position_embeddings",
    default_head_dim: int = 0,
    default_positions: int | None = None,
) -> Sizes:
    """Read the sizes under these keys.

    Args:
        default_head_dim: Where the family has a default of its own; 0: hidden size / heads.
        default_positions: Where files may leave the limit out.

    Raises:
        ModelError: One is missing or odd, or two contradict each other.
    """
    hidden_size, num_heads = config.integer(hidden), config.integer(heads)
    num_kv_heads = config.integer(kv_heads, default=num_heads)
    if num_heads % num_kv_heads:
        config.fail(kv_heads, num_kv_heads, f"must divide {heads} {num_heads}")
    head_dim = config.integer("head_dim", default=default_head_dim, minimum=0)
    if not head_dim:
        if hidden_size % num_heads:
            config.fail(hidden, hidden_size, f"must be a multiple of {heads} {num_heads}")
        head_dim = hidden_size // num_heads
    return Sizes(
        hidden_size,
        config.integer(layers),
        num_heads,
        num_kv_heads,
        head_dim,
        config.integer(positions, default=default_positions),
    )


def read_activation(config: ConfigFile, key: str = "hidden_act", *, default: str = "silu") -> str:
    name = config.text(key, default=default)
    if name not in _ACTIVATIONS:
        config.fail(key, name, f"is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_experts(
    config: ConfigFile,
    key: str = "num_local_experts",
    *,
    chosen: str = "num_experts_per_tok",
    renormalize: bool = True,
) -> ExpertsSpec:
    """Read the sizes of a mixture.

    Args:
        key: That of the number of experts.
        chosen: That of the number of a token's experts.
        renormalize: As of `ExpertsSpec`.
    """
    num_experts, num_experts_per_tok = config.integer(key), config.integer(chosen)
    if num_experts_per_tok > num_experts:
        config.fail(chosen, num_experts_per_tok, f"must be at most {key} {num_experts}")
    return ExpertsSpec(num_experts, num_experts_per_tok, renormalize)


def read_grouped_experts(
    config: ConfigFile,
    key: str = "n_routed_experts",
    *,
    shared: str = "n_shared_experts",
    group_experts: int = 2,
    **choice: Any,
) -> ExpertsSpec:
    """Read a mixture under DeepSeek's keys: groups, a factor, and shared experts as wide as the others.

    Args:
        key: That of the number of experts.
        shared: That of the number of shared experts.
        group_experts: As of `ExpertsSpec`.
        choice: Further fields of it.

    Raises:
        ModelError: Groups do not divide the experts, or those that a token chooses from have too few.
    """
    experts = read_experts(config, key, renormalize=config.boolean("norm_topk_prob", default=True))
    num_groups = config.integer("n_group", default=1)
    top_groups = config.integer("topk_group", default=1)
    if experts.num_experts % num_groups:
        config.fail("n_group", num_groups, f"must divide {key} {experts.num_experts}")
    if top_groups > num_groups:
        config.fail("topk_group", top_groups, f"must be at most n_group {num_groups}")
    eligible = experts.num_experts // num_groups * top_groups
    if experts.num_experts_per_tok > eligible:
        config.fail(
            "num_experts_per_tok",
            experts.num_experts_per_tok,
            f"must be at most the {eligible} experts of topk_group {top_groups} groups",
        )
    return replace(
        experts,
        num_groups=num_groups,
        top_groups=top_groups,
        group_experts=group_experts,
        scale=config.positive("routed_scaling_factor", default=1.0),
        shared_size=config.integer("moe_intermediate_size") * config.integer(shared, default=0, minimum=0),
        **choice,
    )


def read_dense_layers(config: ConfigFile, num_layers: int, *, first: int) -> Set[int]:
    """Return the layers with one MLP in place of the mixture, by the list that says so of each.

    Args:
        first: How many first layers have one, where the file has no list.
    """
    if not config.has("mlp_layer_types"):
        config.pass_over("mlp_layer_types")
        return frozenset(range(first))
    kinds = config.words("mlp_layer_types", length=num_layers, among=("dense", "sparse"))
    return frozenset(index for index, kind in enumerate(kinds) if kind == "dense")


def read_qwen_dense_layers(config: ConfigFile, num_layers: int) -> Set[int]:
    """Return the layers with one MLP in place of the mixture: those of a list, and those outside of a rhythm."""
    every = config.integer("decoder_sparse_step", default=1)
    outside = {index for index in range(num_layers) if (index + 1) % every}
    return config.indices("mlp_only_layers", length=num_layers) | outside


def with_dense_layers(
    layers: tuple[LayerSpec, ...], intermediate_size: int, dense: Container[int]
) -> tuple[LayerSpec, ...]:
    """Return the layers with one MLP in place of the mixture where `dense` has their index.

    Args:
        intermediate_size: Columns of such an MLP.
    """
    return tuple(
        replace(layer, mlp="gated", experts=None, intermediate_size=intermediate_size)
        if index in dense
        else layer
        for index, layer in enumerate(layers)
    )


def read_layer_types(
    config: ConfigFile, num_layers: int, *, default: Callable[[int], str] = lambda index: FULL
) -> tuple[str, ...]:
    """Return the kind of attention of each layer, under Hugging Face's names.

    Args:
        default: Kind of the layer of an index, where the file has no list.
    """
    if config.has("layer_types"):
        return config.words("layer_types", length=num_layers, among=(FULL, SLIDING))
    config.pass_over("layer_types")
    return tuple(default(index) for index in range(num_layers))


def read_window(config: ConfigFile, layer_types: tuple[str, ...]) -> int:
    """Return the window of the layers that have one; 0 where none has.

    Raises:
        ModelError: Layers have one, and its length is missing.
    """
    if SLIDING not in layer_types:
        config.pass_over("sliding_window")
        return 0
    return config.integer("sliding_window")


def read_qwen_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers where a switch beside `sliding_window` is off unless it is set.

    `max_window_layers` is the number of layers before the first one with a window.
    """
    first = config.integer("max_window_layers", default=28, minimum=0)
    has_window = config.boolean("use_sliding_window", default=False) and config.has("sliding_window")
    return read_layer_types(
        config, num_layers, default=lambda index: SLIDING if has_window and index >= first else FULL
    )


def read_rope(
    config: ConfigFile,
    sizes: Sizes,
    *,
    layer_type: str = "",
    theta: float = 10000.0,
    partial: float = 1.0,
    is_interleaved: bool = False,
    other_kinds: Mapping[str, str] | None = None,
) -> RopeParameters:
    """Read the rotary embedding in both layouts: `rope_parameters` holds everything, for all layers or for each type of
    them; formerly `rope_theta` stood beside `rope_scaling`.

    Args:
        layer_type: Type of the layers, where types may differ.
        theta, partial: The family's defaults.
        other_kinds: What the family's files call a kind -> its name.
    """
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    config.pass_over("rope_scaling", "rope_theta", "partial_rotary_factor")
    if rope is not None and layer_type and isinstance(rope.values.get(layer_type), dict):
        rope = rope.section(layer_type)
    rope = rope or ConfigFile(config.path, {})
    for key, value in rope.values.items():
        if isinstance(value, dict):
            rope.fail(key, value, "differs by layer type, which this family does not")
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", default="default")
    kind = (other_kinds or {}).get(kind, kind)
    rope.pass_over("type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "finetuned")
    if kind not in _ROPE_KINDS:
        rope.fail("rope_type", kind, f"is none of {', '.join(_ROPE_KINDS)}")
    at = rope if rope.has("rope_theta") else config
    partial_at = rope if rope.has("partial_rotary_factor") else config
    share = partial_at.number("partial_rotary_factor", default=partial)
    if not 0 < share <= 1:
        partial_at.fail("partial_rotary_factor", share, "must be above 0 and at most 1")
    rotary_dim = sizes.head_dim if kind == "proportional" else int(sizes.head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        partial_at.fail(
            "partial_rotary_factor", share, f"rotates {rotary_dim} elements, must be an even number"
        )
    found = RopeParameters(
        theta=at.positive("rope_theta", default=theta, maximum=1e15),
        kind=kind,
        rotary_dim=0 if rotary_dim == sizes.head_dim else rotary_dim,
        is_interleaved=is_interleaved,
        original_max_position_embeddings=sizes.max_positions,
    )
    return replace(found, **_rope_scaling(config, rope, kind, sizes, share))


def read_query_scaling(config: ConfigFile, sizes: Sizes) -> tuple[float, int] | None:
    """Return `BlockSpec.query_scaling` where a file has it beside the rotary embedding."""
    rope = config.section("rope_parameters")
    if rope is None or not rope.has("llama_4_scaling_beta"):
        return None
    length = rope.integer("original_max_position_embeddings", default=sizes.max_positions)
    return rope.number("llama_4_scaling_beta"), length


def _rope_scaling(
    config: ConfigFile, rope: ConfigFile, kind: str, sizes: Sizes, share: float
) -> dict[str, Any]:
    """Return the fields of `RopeParameters` that this kind reads."""
    if kind == "default":
        # what a file keeps beside a kind that does not read it
        rope.pass_over("factor", "original_max_position_embeddings", "attention_factor")
        config.pass_over("original_max_position_embeddings")
        return {}
    if kind == "linear":
        return {"factor": rope.positive("factor")}
    if (
        kind == "proportional"
    ):  # a share of the frequencies, all of the head: `rotary_dim` counts what is not 0
        return {
            "rotary_dim": 2 * int(share * sizes.head_dim // 2),
            "factor": rope.positive("factor", default=1.0),
        }
    at = config if config.has("original_max_position_embeddings") else rope
    rope.pass_over("original_max_position_embeddings")
    if kind == "llama3":  # a factor that defines the kind has no default
        factors = {key: rope.positive(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return {**factors, "original_max_position_embeddings": at.integer("original_max_position_embeddings")}
    original = at.integer("original_max_position_embeddings", default=sizes.max_positions)
    if kind == "dynamic":
        return {"factor": rope.positive("factor"), "original_max_position_embeddings": original}
    found: dict[str, Any] = {
        "attention_factor": rope.number("attention_factor", default=0.0),
        "original_max_position_embeddings": original,
    }
    if kind == "yarn":
        theta_at = rope if rope.has("rope_theta") else config
        if theta_at.values.get("rope_theta") == 1:
            theta_at.fail("rope_theta", 1, "must not be 1: its logarithm divides")
        mscales = {key: rope.number(key, default=0.0) for key in ("mscale", "mscale_all_dim")}
        for key, mscale in mscales.items():
            if mscale < 0:
                rope.fail(key, mscale, "must be at least 0")
        return found | {
            "factor": rope.positive("factor"),
            "beta_fast": rope.positive("beta_fast", default=32.0),
            "beta_slow": rope.positive("beta_slow", default=1.0),
            "truncate": rope.boolean("truncate", default=True),
            **mscales,
        }
    length = int(sizes.head_dim * share) // 2
    # the file's own factor counts only where it does not say the length before the extension
    factor = rope.positive("factor", default=sizes.max_positions / original)
    if original < 2:
        at.fail("original_max_position_embeddings", original, "must be above 1: its logarithm divides")
    divisors = {key: rope.numbers(key, length=length) for key in ("short_factor", "long_factor")}
    for key, values in divisors.items():
        if min(values) <= 0:
            rope.fail(key, min(values), "must be above 0: frequencies are divided by it")
    return found | {
        "factor": sizes.max_positions / original
        if config.has("original_max_position_embeddings")
        else factor,
        **divisors,
    }


def describe_layers(
    sizes: Sizes,
    *,
    intermediate_size: int,
    rope: RopeParameters | Callable[[int, str], RopeParameters | None] | None,
    layer_types: tuple[str, ...] = (),
    window: int = 0,
    mlp: str = "gated",
    experts: ExpertsSpec | None = None,
) -> tuple[LayerSpec, ...]:
    """Describe layers that differ by their type of attention alone.

    A window as long as the context is none.

    Args:
        rope: That of all layers, or a function of a layer's index and type.
        layer_types: Hugging Face's names; empty: all see all keys.
    """
    return tuple(
        LayerSpec(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=intermediate_size,
            attention=_ATTENTION[kind] if has_window else "full",
            window=window if has_window else 0,
            rope=rope(index, kind) if callable(rope) else rope,
            mlp="experts" if experts else mlp,
            experts=experts,
        )
        for index, kind in enumerate(layer_types or (FULL,) * sizes.num_layers)
        for has_window in (kind != FULL and 0 < window < sizes.max_positions,)
    )


def describe(
    config: ConfigFile,
    sizes: Sizes,
    *,
    layers: tuple[LayerSpec, ...],
    block: BlockSpec,
    ends: EndsSpec | None = None,
    names: TensorNames | None = None,
    is_tied: bool = False,
) -> ModelArchitecture:
    """Join the parts of a description with what every config.json says.

    Args:
        is_tied: The family's default of `tie_word_embeddings`.
    """
    config.pass_over("architectures", "eos_token_id")
    return ModelArchitecture(
        name=architecture_name(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden_size,
        layers=layers,
        max_position_embeddings=sizes.max_positions,
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=is_tied),
        dtype=_dtype(config),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=(),
        block=block,
        ends=ends or EndsSpec(),
        names=names or TensorNames(),
    )


def _dtype(config: ConfigFile) -> str:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(key, default="float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        config.fail(key, dtype, "must be one of float32, bfloat16, float16")
    return dtype
